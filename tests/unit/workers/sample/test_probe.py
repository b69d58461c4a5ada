from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.errors import ServerOpError, UserOpError
from workers.process.gpu_turns import GpuTurns
from workers.process.liveness import Watchdog
from workers.sample import probe
from workers.sample.probe import Probe


@dataclass
class Sampler:
    """Records its requests; fails when the test says so."""

    error: Exception | None = None
    asked: list[SampleRequest] = field(default_factory=list)

    def sample(self, adapter_id: str | None, request: SampleRequest) -> SampleOutput:
        assert adapter_id is None
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return SampleOutput((SampledSequence(np.zeros(1, np.int32), np.zeros(1, np.float32), False),))


class _TickSender:
    def waiting(self) -> int:
        return 0

    def send(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])
    return now


def test_an_idle_sampler_samples_one_token_now_and_then(clock: list[float]):
    sampler, watchdog = Sampler(), Watchdog(_TickSender(), lambda: True, 30.0, print)
    tick = Probe(sampler, watchdog, 30.0, lambda: True, nullcontext)
    for _ in range(100):
        clock[0] += 3.1
        tick()
    assert len(sampler.asked) == 10
    assert {request.max_tokens * request.num_samples for request in sampler.asked} == {1}


def test_a_sampler_with_requests_in_hand_is_left_alone(clock: list[float]):
    sampler, watchdog = Sampler(), Watchdog(_TickSender(), lambda: True, 30.0, print)
    tick = Probe(sampler, watchdog, 30.0, lambda: True, nullcontext)
    with watchdog.working():
        clock[0] += 1000.0
        tick()
    assert sampler.asked == []


def test_a_sampler_that_sleeps_is_not_woken_and_is_probed_at_its_next_turn(clock: list[float]):
    sampler, watchdog, awake = Sampler(), Watchdog(_TickSender(), lambda: True, 30.0, print), [False]
    tick = Probe(sampler, watchdog, 30.0, lambda: awake[0], nullcontext)
    for _ in range(100):
        clock[0] += 3.1
        tick()
    assert sampler.asked == []
    awake[0] = True
    tick()
    assert len(sampler.asked) == 1


def test_a_sampler_that_falls_asleep_before_its_probe_is_not_woken_and_its_tick_ends(tmp_path: Path):
    ours, others = (GpuTurns(tmp_path / "gpus", lambda: None, lambda: None, 60.0) for _ in range(2))
    sampler, watchdog = Sampler(), Watchdog(_TickSender(), lambda: True, 30.0, print)
    tick = Probe(sampler, watchdog, 0.0, lambda: True, lambda: ours.use(within_s=0.1))
    with others.use():
        tick()
    assert sampler.asked == []
    for turns in (ours, others):
        turns.close()


def test_a_sampler_that_cannot_sample_leaves_its_tick_unanswered(clock: list[float]):
    stopped = ServerOpError("the sampler has stopped")
    sampler, watchdog = Sampler(stopped), Watchdog(_TickSender(), lambda: True, 30.0, print)
    tick = Probe(sampler, watchdog, 30.0, lambda: True, nullcontext)
    clock[0] += 31.0
    for _ in range(2):
        with pytest.raises(ServerOpError):
            tick()


def test_a_diverged_model_leaves_no_tick_unanswered_and_is_probed_no_more_often(clock: list[float]):
    sampler = Sampler(UserOpError("the model's logits are not finite"))
    tick = Probe(sampler, Watchdog(_TickSender(), lambda: True, 30.0, print), 30.0, lambda: True, nullcontext)
    for _ in range(100):
        clock[0] += 3.1
        tick()
    assert len(sampler.asked) == 10
