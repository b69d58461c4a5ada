"""A sampler dies of one of several requests it has begun: that one is identified, and the others are not given up."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from app.domain import ops
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import Requeue, ServerOpError
from app.stores.redis import keys
from tests.unit.workers.conftest import await_true
from tests.unit.workers.sample.test_cancellation import OUTPUT, REQUEST, SESSION, HeldBackend, Samplers, samplers
from workers.backends.sampling.base import RequestHandle
from workers.sample.runner import SampleRunner

__all__ = ["samplers"]  # the fixture
POISON = 3


@dataclass
class MortalBackend(HeldBackend):
    """Dies of the poison, with all its running requests, once `together` requests have begun."""

    together: int = 1
    dead: threading.Event = field(default_factory=threading.Event)

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        self.begun.append(request.seed)
        if request.seed == POISON:
            await_true(lambda: len(self.begun) >= self.together, "not all were begun")
            time.sleep(0.3)  # time in which other requests could begin
            self.dead.set()
        if self.dead.wait(60 if self.together > 1 else 0.6):
            raise ServerOpError("the engine died")
        return OUTPUT

    def healthy(self) -> bool:
        return not self.dead.is_set()


def send(runner: SampleRunner, request: str) -> None:
    with contextlib.suppress(Requeue):
        runner.handle(request, SESSION, "sample")


def test_a_request_that_kills_samplers_is_given_up_and_takes_no_other_with_it(samplers: Samplers):
    requests = []
    for seed in range(8):
        payload = ops.encode(replace(REQUEST, seed=seed))
        admitted = samplers.oplog.admit_sample(f"{SESSION}:{seed}", SESSION, "me", "sample.base", payload, f"{seed}")
        requests.append(admitted.request_id)
    begun = []
    for boot in range(4):
        backend = MortalBackend(together=8 if boot < 2 else 1)
        runner = samplers.start(backend, f"s/{boot}")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda request, to=runner: send(to, request), requests))
        samplers.started[-1].parts.keeper.stop()
        samplers.client.delete(*map(keys.lease, requests))
        begun.append(backend.begun)
    assert [len(set(seeds)) for seeds in begun[:2]] == [8, 8], "all were begun when it died"
    assert begun[2][-1] == POISON
    assert sorted(begun[2] + begun[3]) == list(range(8)), "then each has the last of its attempts, one at a time"
    outcomes = [samplers.oplog.outcome(request) for request in requests]
    assert [outcome.failed for outcome in outcomes] == [seed == POISON for seed in range(8)]
    assert "given up" in json.loads(outcomes[POISON].body)["error"]
