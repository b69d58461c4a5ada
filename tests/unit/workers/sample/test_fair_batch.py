"""A whole sampler serves a short request of one project beside a long one of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.domain import ops
from app.domain.records import Sampler
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings
from app.stores.redis.records import dump
from app.wire.results import decode_sample
from tests import assembly
from tests.unit.workers.conftest import BASE, World, await_true
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend

LONG = SampleRequest(np.array([5, 6, 7], np.int32), num_samples=640, max_tokens=400, seed=3, ignore_eos=True)
SHORT = replace(LONG, num_samples=1, max_tokens=4)


@pytest.fixture(scope="module")
def backend(base: BaseModelSettings) -> Iterator[SamplerBackend]:
    sampler = base.sampler.model_copy(update={"backend": "transformers"})
    backend = create(base.model_copy(update={"sampler": sampler}))
    backend.open()
    yield backend
    backend.close()


def admit(world: World, project: str, request: SampleRequest) -> str:
    sampler, payload = f"{project}:sample:0", ops.encode(request)
    world.records.put("samplers", sampler, dump(Sampler(project, project, BASE, 0.0)))
    args = (f"{sampler}:0", sampler, project, f"sample.{BASE}", payload, ops.digest(payload))
    return world.oplog.admit_sample(*args, sequences=request.num_samples).request_id


def test_a_request_for_more_than_the_batch_holds_nobody_up(world: World, backend: SamplerBackend):
    sampler = assembly.sampler(world.client, world.url, world.folder, world.oplog, backend, "s/1")
    world.samplers.append(sampler)
    long, short = admit(world, "long", LONG), admit(world, "short", SHORT)

    def drawn() -> int:
        handle = sampler.runner._running_requests.handles().get(long)
        return handle.tokens_used if handle else 0

    thread = threading.Thread(target=sampler.runner.handle, args=(long, "long:sample:0", "sample"), daemon=True)
    thread.start()
    await_true(lambda: drawn() > 100, "the long one runs")
    before = drawn()
    result = sampler.runner.handle(short, "short:sample:0", "sample")
    took = drawn() - before
    assert result is not None and len(decode_sample(result.body).sequences[0].tokens) == SHORT.max_tokens
    assert world.oplog.outcome(long) is None
    assert took < 64 * LONG.max_tokens * 3 / 4, "without its share it waits for the first 64 samples"
    world.oplog.cancel_sample(long)
    thread.join(60)
    assert not thread.is_alive()
