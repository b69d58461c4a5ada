"""Router replay from a sample to a training step: the sampler stores routes, the journal has them, and a replay after a
crash needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from app import ids
from app.domain import ops
from app.domain.accounts import Caller
from app.domain.ops import AdamParams, Batch, ForwardBackward, OptimStep, Ragged
from app.domain.records import Sampler
from app.domain.results import Result
from app.domain.routes import Span
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import Requeue, Unavailable
from app.services.training import RouteService
from app.settings import BaseModelSettings
from app.stores.objects.folder import FolderStore
from app.stores.objects.routes import RouteFiles
from app.stores.redis import keys
from app.stores.redis.records import dump
from app.wire import tinker_pb2 as pb
from tests import assembly
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.unit.workers.conftest import BASE, LORA, MODEL, PROBE, World, logprob_bytes, probe
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend
from workers.backends.training.base import Create, TrainingBackend

SESSION = "session:sample:0"
PROMPT = np.array([5, 6, 7, 8], np.int32)
REQUEST = SampleRequest(PROMPT, num_samples=2, max_tokens=6, seed=3, ignore_eos=True)
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelSettings:
    path = architectures.build("qwen3-moe", tmp_path_factory.mktemp("moe"))
    byte_tokenizer().save_pretrained(path)
    settings = {"name": BASE, "path": str(path), "dtype": "float32", "router_replay": True}
    return BaseModelSettings.model_validate(
        {**settings, "trainer": {"backend": "torch"}, "sampler": {"backend": "transformers"}}
    )


@pytest.fixture(scope="module")
def backends() -> dict[str, TrainingBackend]:
    return {}


@pytest.fixture(scope="module")
def backend(base: BaseModelSettings) -> Iterator[SamplerBackend]:
    backend = create(base)
    backend.open()
    yield backend
    backend.close()


def admit(world: World) -> str:
    world.records.put(Sampler.namespace, SESSION, dump(Sampler("me", "session", BASE, 0.0)))
    payload = ops.encode(REQUEST)
    queue = f"sample.{BASE}"
    return world.oplog.admit_sample(
        ids.request_id(SESSION, 0), SESSION, "me", queue, payload, ops.digest(payload)
    ).request_id


def sampled(world: World, backend: SamplerBackend) -> list[np.ndarray]:
    """The sampled tokens of a request that the sampler has run."""
    sampler = assembly.sampler(world.client, world.url, world.folder, world.oplog, backend, "s/1")
    world.samplers.append(sampler)
    result = sampler.runner.handle(admit(world), SESSION, "sample")
    assert result is not None and not result.failed
    return [np.frombuffer(one.tokens, "<i4") for one in pb.SampleResponse.FromString(result.body).sequences]


def files(world: World) -> RouteFiles:
    return RouteFiles(FolderStore(world.folder / "objects", "secret", "http://x"), world.records.now)


def datums(samples: list[np.ndarray]) -> Batch:
    tokens = [np.concatenate([PROMPT, sample[:-1]]) for sample in samples]
    targets = [np.concatenate([PROMPT[1:], sample]) for sample in samples]
    return Batch(Ragged.of(tokens, np.int32), {"target_tokens": Ragged.of(targets, np.int64)})


def replayed(world: World, samples: list[np.ndarray]) -> ForwardBackward:
    batch = datums(samples)
    spans = [
        [Span(f"{SESSION}:0-{i}", False, 0, len(PROMPT)), Span(f"{SESSION}:0-{i}", True, 0, len(sample) - 1)]
        for i, sample in enumerate(samples)
    ]
    routes = RouteService(world.records, world.oplog, files(world)).find(Caller.alone("me"), BASE, batch.tokens, spans)
    return ForwardBackward(replace(batch, routes=routes), "cross_entropy")


def test_each_samples_routes_are_stored_before_its_result_can_be_read(world: World, backend: SamplerBackend) -> None:
    samples = sampled(world, backend)
    for i, tokens in enumerate(samples):
        found = files(world).find(f"{SESSION}:0-{i}", world.oplog.routes_of(f"{SESSION}:0"))
        assert np.array_equal(found.prompt, PROMPT) and np.array_equal(found.sample, tokens)
        assert (found.prompt_routes.shape, found.sample_routes.shape) == ((4, 2, 2), (len(tokens) - 1, 2, 2))


class Paused:
    """An engine whose process stands still behind a sample, with other routes than those of another attempt."""

    def __init__(self, backend: SamplerBackend, meanwhile: Callable[[], object]) -> None:
        self._backend, self._meanwhile = backend, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def sample(self, *asked: Any) -> SampleOutput:
        output = self._backend.sample(*asked)
        self._meanwhile()
        assert output.prompt_routes is not None
        return replace(output, prompt_routes=3 - output.prompt_routes)


def test_a_paused_worker_that_lost_its_request_changes_no_routes(world: World, backend: SamplerBackend) -> None:
    def other() -> None:
        world.client.delete(keys.lease(request_id))
        second = assembly.sampler(world.client, world.url, world.folder, world.oplog, backend, "s/2")
        world.samplers.append(second)
        answers.append(second.runner.handle(request_id, SESSION, "sample"))
        found.extend(sequences())

    def sequences() -> list[np.ndarray]:
        attempt = world.oplog.routes_of(request_id)
        return [files(world).find(f"{request_id}-{i}", attempt).prompt_routes for i in range(2)]

    request_id, answers, found = admit(world), list[Result | None](), list[np.ndarray]()
    paused = assembly.sampler(
        world.client, world.url, world.folder, world.oplog, cast(SamplerBackend, Paused(backend, other)), "s/1"
    )
    world.samplers.append(paused)
    assert paused.runner.handle(request_id, SESSION, "sample") == answers[0]
    assert len(found) == 2
    assert [each.tobytes() for each in sequences()] == [each.tobytes() for each in found]
    attempt = world.oplog.routes_of(request_id)
    assert attempt is not None
    kept = FolderStore(world.folder / "objects", "secret", "http://x").list("routes/")
    assert len(kept) == 2 and all(key.endswith(attempt.id) for key in kept)


def test_while_the_object_store_is_away_a_sample_has_no_result_and_costs_no_attempt(
    world: World, backend: SamplerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> bool:
        raise Unavailable("the object store is away")

    sampler = assembly.sampler(world.client, world.url, world.folder, world.oplog, backend, "s/1")
    world.samplers.append(sampler)
    request_id = admit(world)
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "put_new", away)
        for _ in range(4):
            with pytest.raises(Requeue):
                sampler.runner.handle(request_id, SESSION, "sample")
    assert world.oplog.outcome(request_id) is None
    result = sampler.runner.handle(request_id, SESSION, "sample")
    assert result is not None and not result.failed


def test_a_replay_after_a_crash_has_the_same_bits_when_the_routes_files_are_gone(
    world: World, backend: SamplerBackend, tmp_path: Path
) -> None:
    op = replayed(world, sampled(world, backend))
    reference = world.worker("reference/0").backend
    for each in (Create(LORA), op, STEP, op, STEP, PROBE):
        expected = reference.apply({MODEL: each})[MODEL]
    first = world.worker("a/1")
    for seq, each in enumerate((op, STEP, op, STEP), 1):
        world.admit(seq, each)
        if seq < 4:
            assert not first.handle(seq, each.kind).failed
    store = FolderStore(world.folder / "objects", "secret", "http://x")
    store.delete(store.list("routes/"))
    # a/1 died with three seqs applied, and left only the journal.
    successor = world.worker("a/2")
    successor.handle(4, "optim_step")
    assert logprob_bytes(probe(successor, world, 5)) == expected.logprobs.values.tobytes()

    plain = replace(op, batch=replace(op.batch, routes=Ragged.of([3 - each for each in op.batch.routes], np.uint8)))
    reference.close(MODEL)
    for each in (Create(LORA), plain, STEP, plain, STEP, PROBE):
        other = reference.apply({MODEL: each})[MODEL]
    assert other.logprobs.values.tobytes() != expected.logprobs.values.tobytes(), "the routes count for nothing"
