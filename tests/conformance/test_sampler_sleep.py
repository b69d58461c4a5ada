"""vLLM that sleeps between its turns on a GPU draws the same samples as one that never sleeps.

On a CPU the engine pauses and drops its prefix cache as on a GPU; no memory moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from app.domain.sampling import SampleOutput
from tests.conformance.samplers import PROMPTS, Reference, ask, one, tokens_of
from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, RequestHandle, SamplerBackend
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.process.gpu_turns import GpuTurns, SamplerInTurns

pytestmark = pytest.mark.parametrize("sampler", ["vllm"], indirect=True)
_WAIT_S = 240.0


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[GpuTurns]:
    turns = GpuTurns(tmp_path / "gpus", lambda: None, lambda: None, _WAIT_S, turn_s=0.0)
    yield turns
    turns.close()


@pytest.fixture
def shared(sampler: SamplerBackend, trainer: GpuTurns, tmp_path: Path) -> Iterator[SamplerInTurns]:
    """The sampler, beside the `trainer`. A turn ends as soon as the other one asks."""
    shared = SamplerInTurns(cast(VllmSampler, sampler), tmp_path / "gpus", _WAIT_S, turn_s=0.0)
    yield shared
    with shared.turns.use():  # it is awake for the next test
        shared.turns.close()


def sleeps(shared: SamplerInTurns) -> bool:
    return bool(shared._backend._engine.call(lambda engine: engine.is_sleeping()))


def drawn(shared: SamplerInTurns, before_each: Callable[[], None] = lambda: None) -> list[SampleOutput]:
    outputs = []
    for adapter, seed in product((None, "one", "two"), range(3)):
        before_each()
        outputs.append(shared.sample(adapter, ask(PROMPTS[3], num_samples=2, seed=seed)))
    return outputs


def test_samples_between_turns_of_a_trainer_are_equal(shared: SamplerInTurns, trainer: GpuTurns) -> None:
    expected = [tokens_of(output) for output in drawn(shared)]
    ended, turns = threading.Event(), 0

    def train() -> None:
        nonlocal turns
        while not ended.is_set():
            with trainer.use():
                assert sleeps(shared)
                turns += 1

    def await_a_turn() -> None:
        before = turns
        await_true(lambda: turns > before or training.done(), "the trainer has another turn")

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            found = [tokens_of(output) for output in drawn(shared, await_a_turn)]
        finally:
            ended.set()
        training.result(_WAIT_S)
    assert found == expected


def test_the_prefix_cache_is_empty_after_a_sleep_and_scores_are_right(
    shared: SamplerInTurns, trainer: GpuTurns, reference: Reference
) -> None:
    asked = ask(PROMPTS[3], prompt_logprobs=True, max_tokens=1)
    cached = [shared.sample("one", ask(PROMPTS[3])).cached_tokens for _ in range(2)]
    assert cached[1] > 0
    with trainer.use():
        assert sleeps(shared)
    assert shared.sample("one", ask(PROMPTS[3])).cached_tokens == 0
    scores = shared.sample("one", asked).prompt_logprobs
    assert scores is not None
    np.testing.assert_allclose(scores[1:], reference.logprobs("one", PROMPTS[3]), atol=1e-3)


def test_an_adapter_that_arrives_during_a_trainers_turn_is_loaded_after_it(
    shared: SamplerInTurns, trainer: GpuTurns, reference: Reference
) -> None:
    one(shared, None, PROMPTS[1])
    with ThreadPoolExecutor(1) as pool:
        with trainer.use():
            loading = pool.submit(shared.load, "late", reference.adapters["two"])
            await_true(lambda: shared.turns._waiting, "the load waits for its turn")
            assert "late" not in shared.describe()["adapters"]
            assert shared.healthy()
        loading.result(_WAIT_S)
    assert one(shared, "late", PROMPTS[1], temperature=0.0).tokens.tolist() == reference.greedy("two", PROMPTS[1], 12)
    shared.evict("late")
    with trainer.use():
        assert sleeps(shared)
    shared.load("late", reference.adapters["one"])
    assert one(shared, "late", PROMPTS[1], temperature=0.0).tokens.tolist() == reference.greedy("one", PROMPTS[1], 12)
    shared.evict("late")


def test_a_trainer_waits_for_a_request_that_runs_and_a_cancelled_one_lets_it_begin(
    shared: SamplerInTurns, trainer: GpuTurns
) -> None:
    request = ask(PROMPTS[0], num_samples=512, max_tokens=200)
    begun = threading.Event()
    handle = RequestHandle(lambda *_: begun.set())
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(shared.sample, "one", request, handle)
        assert begun.wait(_WAIT_S)
        training = pool.submit(_use, trainer)
        await_true(lambda: not shared.turns.held, "the sampler takes no new request")
        assert not sleeps(shared)
        handle.abort()
        with pytest.raises(Aborted):
            running.result(_WAIT_S)
        training.result(_WAIT_S)


def _use(turns: GpuTurns) -> None:
    with turns.use():
        pass
