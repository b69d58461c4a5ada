"""Sampling requests journaled by a newer version: an older sampler leaves them to a newer one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.domain import ops
from app.domain.records import Sampler
from app.domain.sampling import SampleRequest
from app.errors import Requeue
from app.stores.redis import keys
from app.stores.redis.records import dump
from tests.unit.workers import newer_version
from tests.unit.workers.conftest import BASE, World
from tests.unit.workers.sample.test_runner import REQUEST, SESSION, admit, backend, runner, tokens
from workers.backends.sampling.base import SamplerBackend
from workers.sample import runner as sample_runner

__all__ = ["backend"]


def journal(world: World, seq: int, payload: bytes) -> str:
    world.records.put("samplers", SESSION, dump(Sampler("me", "session", BASE, 0.0)))
    queue = f"sample.{BASE}"
    return world.oplog.admit_sample(f"{SESSION}:{seq}", SESSION, "me", queue, payload, ops.digest(payload)).request_id


@newer_version.WAYS
def test_a_newer_request_is_left_without_an_attempt_and_free_for_a_newer_sampler(
    world: World,
    backend: SamplerBackend,
    write: Callable[[SampleRequest], bytes],
    caplog: pytest.LogCaptureFixture,
):
    request = journal(world, 0, write(REQUEST))
    for boot in range(5):  # more often than a request has attempts, each time in another process
        caplog.clear()
        with caplog.at_level("INFO"), pytest.raises(Requeue, match="version"):
            runner(world, backend, f"old/{boot}").handle(request, SESSION, "sample")
        said = [record for record in caplog.records if record.name == sample_runner.__name__]
        assert [record.request_id for record in said] == [request]
    assert int(world.client.hget(keys.op(request), "attempts") or 0) == 0
    assert not world.client.exists(keys.lease(request))
    assert world.oplog.outcome(request) is None
    assert [(pending.id, pending.running) for pending in world.oplog.pending() if pending.seq is None] == [
        (request, False)
    ]


def test_an_old_sampler_goes_on_with_others_and_a_newer_one_runs_it(
    world: World, backend: SamplerBackend, monkeypatch: pytest.MonkeyPatch
):
    old = runner(world, backend, "old/1")
    request = journal(world, 0, newer_version.encode(REQUEST))
    with pytest.raises(Requeue):
        old.handle(request, SESSION, "sample")
    other = old.handle(admit(world, 1), SESSION, "sample")
    newer_version.upgrade(monkeypatch)
    result = runner(world, backend, "new/1").handle(request, SESSION, "sample")
    assert other is not None and result is not None and not result.failed
    assert tokens(result.body) == tokens(other.body), "the seed of both is the same"
