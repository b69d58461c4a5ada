"""Cancellation of sampling requests while they wait, while they run, and after they end."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from app.domain import ops
from app.domain.limits import FREE, PROJECT, Charge, Limits, Payer
from app.domain.records import Sampler
from app.domain.results import Result
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.errors import Requeue, Unavailable
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Entry
from tests import assembly
from tests.pages import device_ms, used
from tests.unit.workers.conftest import await_true, stop
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.sample.runner import SampleRunner

SESSION = "session:sample:0"
REQUEST = SampleRequest(np.array([5, 6, 7], dtype=np.int32), num_samples=1, max_tokens=4, seed=3)
DRAWN, CACHED = 2, 1
OUTPUT = SampleOutput((SampledSequence(np.array([1], np.int32), np.array([-1.0], np.float32), True),))


@dataclass
class HeldBackend:
    """Runs a request until it is released or aborted, like an engine."""

    batch, adapter_capacity = 64, 8

    release: threading.Event = field(default_factory=threading.Event)
    begun: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        assert handle is not None
        handle.sampled_tokens += DRAWN
        handle.cached_tokens = CACHED
        self.begun.append(request.seed)
        stopped = threading.Event()
        handle.on_abort(stopped.set)
        while not (stopped.is_set() or self.release.is_set()):
            stopped.wait(0.005)
        if handle.aborted:
            self.aborted.append(request.seed)
            raise Aborted("stopped")
        return OUTPUT

    def healthy(self) -> bool:
        return True

    def describe(self) -> dict[str, object]:
        return {}


@dataclass
class Samplers:
    """Sampler processes of one base, put together as in production."""

    client: redis.Redis
    url: str
    folder: Path
    settings: EngineSettings
    oplog: RedisOpLog
    started: list[assembly.Sampler] = field(default_factory=list)

    def start(
        self, backend: HeldBackend, worker: str, *, misses_messages: bool = False, keeper_lease_s: float = 3600
    ) -> SampleRunner:
        """Starts a sampler. `misses_messages`: it gets no cancellation messages. It renews its leases three times per
        `keeper_lease_s`."""
        overrides = {"cancelled": "nothing"} if misses_messages else {}
        args = (self.client, self.url, self.folder, self.oplog, backend, worker)
        sampler = assembly.sampler(*args, lease_s=keeper_lease_s, **overrides)
        self.started.append(sampler)
        assert sampler.cancellations.listening.wait(60)
        return sampler.runner

    def admit(self, seq: int, tokens: int = 0, charge: Charge = FREE) -> str:
        payload, request_id = ops.encode(REQUEST), f"{SESSION}:{seq}"
        self.oplog.admit_sample(request_id, SESSION, "me", "sample.base", payload, f"{seq}", tokens, None, 1, charge)
        return request_id


@pytest.fixture
def samplers(client: redis.Redis, valkey: str, tmp_path: Path) -> Iterator[Samplers]:
    settings = EngineSettings(lease_s=3600)  # a stalled machine must not lose a request, nor report a lost one
    RedisRecords(client).put_new(Sampler.namespace, SESSION, dump(Sampler("me", "session", "base", 0.0)))
    made = Samplers(client, valkey, tmp_path, settings, RedisOpLog(client, settings))
    yield made
    for sampler in made.started:
        stop(sampler)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Returns the thread of a call, and the call's outcome."""
    came: list[object] = []

    def run() -> None:
        try:
            came.append(call())
        except Requeue as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


def is_cancelled(result: Result | None) -> bool:
    return result is not None and result.failed and "cancelled" in json.loads(result.body)["error"]


def test_a_request_that_was_cancelled_while_it_waited_never_runs(samplers: Samplers):
    backend = HeldBackend()
    request = samplers.admit(0)
    samplers.oplog.cancel_sample(request)
    assert is_cancelled(samplers.start(backend, "s/1").handle(request, SESSION, "sample"))
    assert backend.begun == []


def test_a_cancelled_request_is_stopped_in_the_engine_and_nothing_more_is_written(samplers: Samplers):
    backend = HeldBackend()
    request = samplers.admit(0)
    runner = samplers.start(backend, "s/1")
    thread, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    await_true(lambda: backend.begun, "it never ran")
    samplers.oplog.cancel_sample(request)
    before = samplers.client.hgetall(keys.future(request))
    thread.join(60)
    assert backend.aborted == [REQUEST.seed]
    assert is_cancelled(came[0])
    assert samplers.client.hgetall(keys.future(request)) == before
    assert samplers.client.keys("*op:*") == []


@pytest.mark.parametrize("ends", ["at once", "at its end", "in an outage"])
def test_a_request_that_is_cancelled_while_it_runs_is_charged_and_counts_its_prompt_and_what_it_drew_once(
    samplers: Samplers, monkeypatch: pytest.MonkeyPatch, ends: str
):
    """At its end it has an output, which says what it drew. In an outage the worker cannot report it yet."""
    drawn, cached = (1, 0) if ends == "at its end" else (DRAWN, CACHED)
    is_away, put_off = threading.Event(), samplers.oplog.put_off_sample

    def put_off_if_reachable(*report: Any) -> None:
        if is_away.is_set():
            raise redis.ConnectionError("away")
        put_off(*report)

    monkeypatch.setattr(samplers.oplog, "put_off_sample", put_off_if_reachable)
    samplers.settings = EngineSettings(lease_s=3600)  # so that the renewal of the lease reports nothing
    me, backend = Payer(PROJECT, "me", Limits(tokens_per_s=0.001)), HeldBackend()
    request = samplers.admit(0, 1000, Charge((me,), 1000, 1))
    runner = samplers.start(backend, "s/1", misses_messages=ends == "at its end")
    runner._device_clock._now = count().__next__  # a second passes between its entry and its end
    thread, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    await_true(lambda: backend.begun, "it never ran")
    if ends == "in an outage":
        is_away.set()
    samplers.oplog.cancel_sample(request)
    if ends == "at its end":
        backend.release.set()
    thread.join(60)
    is_away.clear()
    assert is_cancelled(came[0])
    runner.handle(request, SESSION, "sample")  # its message comes a second time
    tokens_per_s = RedisQuotas(samplers.client, samplers.settings).used(me).tokens_per_s
    assert tokens_per_s == pytest.approx((len(REQUEST.prompt) + drawn) / 10, rel=1e-2)
    assert used(samplers.client) == {
        "sampling_prefill session base": len(REQUEST.prompt) - cached,
        "sampling_sample session base": drawn,
        **({"sampling_prefill_cached session base": cached} if cached else {}),
    }
    assert device_ms(samplers.client) == 1000


def test_what_is_cancelled_just_after_its_worker_took_it_is_stopped_too(
    samplers: Samplers, monkeypatch: pytest.MonkeyPatch
):
    request = samplers.admit(0)
    runner = samplers.start(HeldBackend(), "s/1", misses_messages=True)
    claim = samplers.oplog.claim_sample

    def claimed_and_cancelled(request_id: str, *limits: object) -> Entry | None:
        entry = claim(request_id, *limits)
        samplers.oplog.cancel_sample(request_id)
        runner._running_requests.abort(request_id)  # the message arrives before everything else
        return entry

    monkeypatch.setattr(samplers.oplog, "claim_sample", claimed_and_cancelled)
    thread, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    thread.join(60)
    assert is_cancelled(came[0])


def test_what_is_cancelled_while_its_adapter_is_not_to_be_had_is_not_put_off(
    samplers: Samplers, monkeypatch: pytest.MonkeyPatch
):
    request = samplers.admit(0)
    runner = samplers.start(HeldBackend(), "s/1")

    def away(*_: object) -> None:
        samplers.oplog.cancel_sample(request)
        raise Unavailable("the store is away")

    monkeypatch.setattr(runner._adapters, "use", away)
    assert is_cancelled(runner.handle(request, SESSION, "sample"))


def test_the_other_requests_of_the_engine_go_on(samplers: Samplers):
    backend = HeldBackend()
    runner = samplers.start(backend, "s/1")
    cancelled, other = samplers.admit(0), samplers.admit(1)
    first, second = (
        in_thread(lambda id_=request: runner.handle(id_, SESSION, "sample")) for request in (cancelled, other)
    )
    await_true(lambda: len(backend.begun) == 2, "both never ran")
    samplers.oplog.cancel_sample(cancelled)
    first[0].join(60)
    assert len(backend.aborted) == 1
    backend.release.set()
    second[0].join(60)
    assert not second[1][0].failed


def test_a_worker_that_missed_the_message_learns_of_it_from_its_lease(samplers: Samplers):
    backend = HeldBackend()
    request = samplers.admit(0)
    runner = samplers.start(backend, "s/1", misses_messages=True, keeper_lease_s=0.3)
    thread, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    await_true(lambda: backend.begun, "it never ran")
    samplers.oplog.cancel_sample(request)
    thread.join(60)
    assert is_cancelled(came[0])


def test_a_running_sample_of_a_silent_session_leaves_the_engine_and_comes_back_with_its_client(samplers: Samplers):
    backend, lifecycle = HeldBackend(), RedisLifecycle(samplers.client, samplers.settings)
    request = samplers.admit(0)
    runner = samplers.start(backend, "s/1", keeper_lease_s=0.3)
    for silence in (1, 2):
        thread, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
        await_true(lambda runs=silence: len(backend.begun) == runs, "it never ran")
        samplers.client.zadd(keys.SESSIONS_HEARD, {"session": 1})
        assert lifecycle.pause_samples() == 1
        thread.join(60)
        assert (isinstance(came[0], Requeue), len(backend.aborted)) == (True, silence)
        with pytest.raises(Requeue):  # it was dispatched before the pause
            runner.handle(request, SESSION, "sample")
        lifecycle.heartbeat("session")
        assert lifecycle.resume_samples() == 1
    assert [id_ for id_, _ in samplers.oplog.release_samples("sample.base")] == [request]
    backend.release.set()
    result = runner.handle(request, SESSION, "sample")
    assert result is not None and not result.failed
    assert backend.begun == [REQUEST.seed] * 3
    assert samplers.client.exists(keys.op(request)) == 0


def test_a_request_whose_lease_was_lost_stops_and_leaves_the_result_to_its_new_owner(samplers: Samplers):
    slow, quick = HeldBackend(), HeldBackend()
    request = samplers.admit(0)
    runner = samplers.start(slow, "s/1", keeper_lease_s=0.3)
    thread, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    await_true(lambda: slow.begun, "it never ran")
    samplers.client.set(keys.lease(request), "s/2", px=3_600_000)  # the lease of s/1 expired; s/2 runs it
    thread.join(60)
    assert isinstance(came[0], Requeue), "its dispatch is not the end of the future"
    assert samplers.oplog.outcome(request) is None
    samplers.client.delete(keys.lease(request))
    quick.release.set()
    result = samplers.start(quick, "s/2").handle(request, SESSION, "sample")
    assert result is not None and not result.failed


def test_a_request_that_lost_its_lease_runs_again_here_only_when_its_first_attempt_has_ended(
    samplers: Samplers, monkeypatch: pytest.MonkeyPatch
):
    """The state server was away for longer than a lease while that attempt fetched its adapter, which cannot be
    aborted."""
    backend, fetching, fetched = HeldBackend(), threading.Event(), threading.Event()
    request = samplers.admit(0)
    runner = samplers.start(backend, "s/1", misses_messages=True, keeper_lease_s=0.3)
    use = runner._adapters.use

    @contextmanager
    def use_late(*args: Any) -> Iterator[str | None]:
        fetching.set()
        assert fetched.wait(60)
        with use(*args) as adapter_id:
            yield adapter_id

    monkeypatch.setattr(runner._adapters, "use", use_late)
    first, came = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    assert fetching.wait(60)
    samplers.client.delete(keys.lease(request))
    await_true(lambda: runner._running_requests.handles()[request].aborted, "the lost lease did not stop it")
    second, again = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    await_true(lambda: again or samplers.client.exists(keys.lease(request)), "the second dispatch was not handled")
    fetched.set()
    first.join(60)
    assert isinstance(came[0], Requeue)
    third, _ = in_thread(lambda: runner.handle(request, SESSION, "sample"))
    await_true(lambda: samplers.client.exists(keys.lease(request)) and backend.begun, "it never ran again")
    samplers.client.pexpire(keys.lease(request), 600_000)  # the lease has 10 of its 60 minutes left
    await_true(lambda: samplers.client.pttl(keys.lease(request)) > 600_000, "its lease is not renewed")
    backend.release.set()
    for thread in (second, third):
        thread.join(60)
    assert len(backend.begun) - len(backend.aborted) == 1
    outcome = samplers.oplog.outcome(request)
    assert outcome is not None and not outcome.failed


def test_a_request_that_ends_just_as_it_is_cancelled_has_one_result(samplers: Samplers):
    """Either of the two may come first; the test covers both orders."""
    backend = HeldBackend()
    runner = samplers.start(backend, "s/1")
    for seq in range(30):
        backend.release.clear()
        begun = len(backend.begun)
        request = samplers.admit(seq)
        thread, came = in_thread(lambda id_=request: runner.handle(id_, SESSION, "sample"))
        await_true(lambda since=begun: len(backend.begun) > since, "it never ran")
        canceller, won = in_thread(lambda id_=request: samplers.oplog.cancel_sample(id_))
        backend.release.set()
        canceller.join(60)
        thread.join(60)
        assert is_cancelled(samplers.oplog.outcome(request)) == won[0]
        assert came == [samplers.oplog.outcome(request)]


def test_a_storm_of_200_requests_half_of_them_cancelled_loses_none(samplers: Samplers):
    """Two workers; doubled dispatches in any order; one worker dies with running requests; cancellations at any
    time."""
    dice = random.Random(5)
    backend = HeldBackend()
    backend.release.set()
    requests = [samplers.admit(seq) for seq in range(200)]
    unwanted = set(dice.sample(requests, 100))
    for request in requests[::10]:
        samplers.oplog.claim_sample(request, "dead/1")
        samplers.client.delete(keys.lease(request))
    runners = [samplers.start(backend, f"s/{i}") for i in range(2)]
    bells: list[Callable[[], object]] = [
        lambda id_=request, to=runner: _send(to, id_) for request in requests for runner in runners
    ]
    bells += [lambda id_=request: samplers.oplog.cancel_sample(id_) for request in unwanted]
    dice.shuffle(bells)
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda ticks: ticks(), bells))
    _dispatch_what_waits(samplers, runners[0])
    outcomes = {request: samplers.oplog.outcome(request) for request in requests}
    assert all(outcomes.values()), "every future is terminal"
    cancelled = {request for request, result in outcomes.items() if is_cancelled(result)}
    assert cancelled <= unwanted
    assert sum(found is True for found in won) == len(cancelled), "a cancel that won is a cancelled future"
    assert not any(outcomes[request].failed for request in set(requests) - cancelled)
    assert samplers.oplog.pending() == []
    assert samplers.client.exists(keys.PREFIX + "sampling:sample.base") == 0


def _send(runner: SampleRunner, request: str) -> Result | Requeue | None:
    try:
        return runner.handle(request, SESSION, "sample")
    except Requeue as error:
        return error


def _dispatch_what_waits(samplers: Samplers, runner: SampleRunner) -> None:
    """Dispatches waiting requests like the redispatch task."""
    for waiting in samplers.oplog.pending():
        _send(runner, waiting.id)
