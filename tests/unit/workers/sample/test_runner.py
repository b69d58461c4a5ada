"""A sampling future runs once at a time, on any worker, and again after a crash, with one result."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import redis

from app.domain import ops
from app.domain.checkpoints import CheckpointPrefix
from app.domain.records import Demand, Sampler, ShmTransfer
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import Requeue, ServerOpError, Unavailable
from app.settings import BaseModelSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.completions import TokenStreams
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import dump
from app.wire import tinker_pb2 as pb
from tests import assembly
from tests.faults.proxy import Proxy
from tests.unit.workers.conftest import BASE, World, await_true
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import RequestHandle, SamplerBackend
from workers.sample import adapter_files
from workers.sample.runner import SampleRunner

SESSION = "session:sample:0"
REQUEST = SampleRequest(np.array([5, 6, 7], dtype=np.int32), num_samples=2, max_tokens=4, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def backend(base: BaseModelSettings) -> Iterator[SamplerBackend]:
    sampler = base.sampler.model_copy(update={"backend": "transformers"})
    backend = create(base.model_copy(update={"sampler": sampler}))
    backend.open()
    yield backend
    backend.close()


class Engine:
    """The parts of an engine that no request asks for."""

    batch, adapter_capacity = 64, 8

    def healthy(self) -> bool:
        return True

    def describe(self) -> dict[str, object]:
        return {}


def runner(
    world: World,
    backend: SamplerBackend,
    worker: str,
    send: Callable[..., None] = lambda *send: None,
    tensor_parallel: int = 1,
) -> SampleRunner:
    args = (world.client, world.url, world.folder, world.oplog, backend, worker, send)
    sampler = assembly.sampler(*args, tensor_parallel=tensor_parallel)
    world.samplers.append(sampler)
    return sampler.runner


def admit(world: World, seq: int, request: SampleRequest = REQUEST, prefix: str = "", sequences: int = 1) -> str:
    world.records.put("samplers", SESSION, dump(Sampler("me", "session", BASE, 0.0, prefix=prefix)))
    payload = ops.encode(request)
    return world.oplog.admit_sample(
        f"{SESSION}:{seq}", SESSION, "me", f"sample.{BASE}", payload, ops.digest(payload), sequences=sequences
    ).request_id


def tokens(body: bytes) -> list[bytes]:
    return [sequence.tokens for sequence in pb.SampleResponse.FromString(body).sequences]


def test_a_request_runs_on_the_version_that_it_was_admitted_for(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    world.records.put("samplers", SESSION, dump(Sampler("me", "session", BASE, 0.0, prefix="m/later/2")))
    result = runner(world, backend, "node/1").handle(request, SESSION, "sample")
    assert result is not None and not result.failed, "no file of the later version is there"


def test_what_is_handed_back_costs_no_attempt_and_no_further_request_begins(world: World, backend: SamplerBackend):
    begun, end = threading.Event(), threading.Event()

    class Slow(Engine):
        def sample(self, adapter: str | None, request: SampleRequest, handle: RequestHandle) -> SampleOutput:
            begun.set()
            assert end.wait(60)
            return SampleOutput(())

    ending, request = runner(world, cast(SamplerBackend, Slow()), "s/1"), admit(world, 0)
    thread = threading.Thread(target=ending.handle, args=(request, SESSION, "sample"))
    thread.start()
    try:
        assert begun.wait(60)
        assert ending.hand_back() == [request]
        assert world.client.hget(keys.op(request), "attempts") == b"0"
        with pytest.raises(Requeue, match="about to end"):
            ending.handle(admit(world, 1), SESSION, "sample")
        result = runner(world, backend, "s/2").handle(request, SESSION, "sample")
        assert result is not None and not result.failed
    finally:
        end.set()
        thread.join(60)
    assert world.oplog.outcome(request) == result, "that of the worker which handed it back comes too late"


def test_a_sample_is_answered_with_every_sequence_and_its_logprobs(world: World, backend: SamplerBackend):
    result = runner(world, backend, "s/1").handle(admit(world, 0), SESSION, "sample")
    assert result is not None and not result.failed
    sequences = pb.SampleResponse.FromString(result.body).sequences
    assert [len(sequence.tokens) for sequence in sequences] == [16, 16]
    assert all(len(sequence.logprobs) == 16 for sequence in sequences)


def test_a_streamed_request_reports_its_tokens_and_another_does_not(world: World, backend: SamplerBackend):
    sampler, streams = runner(world, backend, "s/1"), TokenStreams(world.client)
    streamed = admit(world, 0, replace(REQUEST, stream=True))
    result = sampler.handle(streamed, SESSION, "sample")
    other = sampler.handle(admit(world, 1), SESSION, "sample")
    assert result is not None and other is not None
    expected = tokens(result.body)
    found: dict[int, bytes] = {}

    def all_there() -> bool:
        found.update({0: b"", 1: b""})
        for sampled in streams.read(streamed, "0-0")[0]:
            found[sampled.index] += sampled.tokens.tobytes()
        return list(found.values()) == expected

    await_true(all_there, "the stream has the tokens of the result")
    assert expected == tokens(other.body), "a streamed request draws the same"
    assert not world.client.exists(keys.stream(f"{SESSION}:1"))


def test_a_doubled_dispatch_gives_the_first_result(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    first = runner(world, backend, "s/1").handle(request, SESSION, "sample")
    assert runner(world, backend, "s/2").handle(request, SESSION, "sample") == first


def test_what_another_worker_runs_is_left_to_it_until_its_lease_ends(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    world.oplog.claim_sample(request, "dead/1")
    world.client.persist(keys.lease(request))
    successor = runner(world, backend, "s/1")
    with pytest.raises(Requeue):
        successor.handle(request, SESSION, "sample")
    world.client.delete(keys.lease(request))
    again = successor.handle(request, SESSION, "sample")
    other = successor.handle(admit(world, 1), SESSION, "sample")
    assert again is not None and other is not None
    assert tokens(again.body) == tokens(other.body), "the same seed draws the same tokens wherever it runs"


def test_an_adapter_that_only_a_trainer_can_bring_demands_a_trainer(
    world: World, backend: SamplerBackend, monkeypatch: pytest.MonkeyPatch
):
    """None may run: an autoscaler has to start one."""
    monkeypatch.setattr(adapter_files, "_PATIENCE_S", 0.0)
    prefix = str(CheckpointPrefix("s:train:0", "sampler_weights", "x", 1, 4))
    world.records.put(ShmTransfer.namespace, prefix, dump(ShmTransfer("s:train:0", 4)))
    with pytest.raises(Requeue):
        runner(world, backend, "s/1").handle(admit(world, 0, prefix=prefix), SESSION, "sample")
    assert [key for key, _ in world.records.list(Demand.namespace)] == ["trainer/base"]


def test_a_lost_adapter_fails_its_own_request_as_the_servers_fault(world: World, backend: SamplerBackend):
    result = runner(world, backend, "s/1").handle(admit(world, 0, prefix="models/gone"), SESSION, "sample")
    assert result is not None and result.failed
    assert json.loads(result.body)["category"] == "server"


def test_a_request_that_keeps_killing_samplers_is_given_up(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    for i in range(3):
        world.oplog.claim_sample(request, f"dead/{i}")
        world.client.delete(keys.lease(request))
    successor = runner(world, backend, "s/1")
    with pytest.raises(Requeue):  # the last of these workers may still be alive
        successor.handle(request, SESSION, "sample")
    world.outlast(request)
    result = successor.handle(request, SESSION, "sample")
    assert result is not None and result.failed
    assert "given up" in json.loads(result.body)["error"]


def test_a_store_that_is_away_costs_a_request_no_attempt(world: World, backend: SamplerBackend, monkeypatch):
    request = admit(world, 0)

    def away(*_: object) -> None:
        raise Unavailable("the store is away")

    for boot in range(5):  # more often than a request has attempts, each time in another process
        sampler = runner(world, backend, f"s/{boot}")
        with monkeypatch.context() as patch:
            patch.setattr(sampler._adapters, "use", away)
            with pytest.raises(Requeue):
                sampler.handle(request, SESSION, "sample")
    result = runner(world, backend, "s/5").handle(request, SESSION, "sample")
    assert result is not None and not result.failed


def test_a_request_whose_result_met_an_outage_counts_no_later_death_of_its_sampler(
    world: World, backend: SamplerBackend, valkey: str
):
    request = admit(world, 0)
    with Proxy(valkey) as proxy:
        behind = replace(world, client=connect(proxy.url), oplog=RedisOpLog(connect(proxy.url), world.settings))

        class CutOff(Engine):
            def sample(self, *arguments: Any) -> SampleOutput:
                proxy.refuse()
                return backend.sample(*arguments)

        for boot in range(4):  # more often than a request has attempts, each time in another process
            sampler = runner(behind, cast(SamplerBackend, CutOff()), f"s/{boot}")
            with pytest.raises(redis.ConnectionError):
                sampler.handle(request, SESSION, "sample")
            proxy.go_on()
            sampler._keeper.put_offs.flush()
    assert world.client.hget(keys.op(request), "attempts") == b"0"
    result = runner(world, backend, "s/4").handle(request, SESSION, "sample")
    assert result is not None and not result.failed


def test_a_request_whose_content_cannot_be_fetched_now_is_left_to_be_run_later(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    store = FolderStore(world.folder / "objects", "secret", "http://x")
    assert RedisPayloads(world.client, world.settings, store).spill(request)
    with pytest.raises(Requeue, match="object store"):
        runner(world, backend, "s/1").handle(request, SESSION, "sample")  # it has no object store
    assert not world.client.exists(keys.lease(request))
    world.oplog = RedisOpLog(world.client, world.settings, store)
    result = runner(world, backend, "s/2").handle(request, SESSION, "sample")
    assert result is not None and not result.failed


def test_a_request_whose_content_is_lost_fails_as_the_servers_fault(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    store = FolderStore(world.folder / "objects", "secret", "http://x")
    assert RedisPayloads(world.client, world.settings, store).spill(request)
    spilled = world.client.hget(keys.op(request), "spilled")
    assert spilled is not None
    store.delete([spilled.decode()])
    world.oplog = RedisOpLog(world.client, world.settings, store)
    result = runner(world, backend, "s/1").handle(request, SESSION, "sample")
    assert result is not None and result.failed
    assert "is lost" in json.loads(result.body)["error"]


def test_an_unexpected_error_ends_a_request_too(world: World, backend: SamplerBackend):
    """The worker survives the error, so no attempt would be the last."""

    class Surprising(Engine):
        def sample(
            self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
        ) -> SampleOutput:
            raise KeyError("nobody knows")

    result = runner(world, Surprising(), "s/1").handle(admit(world, 0), SESSION, "sample")
    assert result is not None and result.failed
    assert json.loads(result.body) == {
        "error": "sampling failed: KeyError; see the sampler's log",
        "category": "server",
    }


def test_the_next_throttled_request_of_a_project_is_dispatched_as_one_ends(world: World, backend: SamplerBackend):
    dispatched: list[tuple[str, ...]] = []
    sampler = runner(world, backend, "s/1", lambda *send: dispatched.append(send))
    first = admit(world, 0, sequences=64)
    throttled = admit(world, 1, sequences=64)
    sampler.handle(first, SESSION, "sample")
    assert dispatched == [("sample", throttled, SESSION, f"sample.{BASE}")]
    sampler.handle(throttled, SESSION, "sample")
    assert len(dispatched) == 1


def test_a_sample_is_charged_to_its_project_for_what_was_drawn(world: World, backend: SamplerBackend):
    sampler = runner(world, backend, "s/1")
    fair_queue = sampler._batch_admission._fair_queue
    fair_queue.charge("other", 10**6)
    sampler.handle(admit(world, 0, replace(REQUEST, max_tokens=4)), SESSION, "sample")
    assert fair_queue.virtual_time("me") - fair_queue.virtual_time("new") == len(REQUEST.prompt) + 2 * 4


def test_a_request_that_is_stopped_at_admission_never_reaches_the_engine(world: World, backend: SamplerBackend):
    sampler = runner(world, Stuck(), "s/1")
    sampler._batch_admission._most_sequences = sampler._batch_admission._batch = 1
    requests = [admit(world, seq) for seq in range(2)]
    threads = [threading.Thread(target=sampler.handle, args=(request, SESSION, "sample")) for request in requests]
    for thread, count in zip(threads, (0, 1), strict=True):
        thread.start()
        await_true(lambda count=count: len(sampler._batch_admission._waiting) == count, "it is at the gate")
        await_true(lambda: Stuck.begun == 1, "the first is in")
    world.oplog.cancel_sample(requests[1])
    sampler._running_requests.abort(requests[1])
    threads[1].join(60)
    Stuck.free.set()
    threads[0].join(60)
    assert Stuck.begun == 1
    outcomes = [world.oplog.outcome(request) for request in requests]
    assert [outcome is not None and outcome.failed for outcome in outcomes] == [False, True]


class Stuck(Engine):
    """An engine whose requests run until `free` is set."""

    begun, free = 0, threading.Event()

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        type(self).begun += 1
        assert self.free.wait(60)
        return SampleOutput(())


class DyingBackend(Engine):
    """An engine that dies during the first request, as vLLM's does when its process is killed."""

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        raise ServerOpError("the engine died")

    def healthy(self) -> bool:
        return False


def test_a_request_outlives_the_engine_that_died_under_it(world: World, backend: SamplerBackend):
    request = admit(world, 0)
    with pytest.raises(Requeue):
        runner(world, DyingBackend(), "s/1").handle(request, SESSION, "sample")
    world.client.delete(keys.lease(request))
    result = runner(world, backend, "s/2").handle(request, SESSION, "sample")
    assert result is not None and not result.failed
