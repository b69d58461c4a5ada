"""Work moves the metrics of a worker: stages, attempts, restores, snapshots, leases, tokens, adapters, the batch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from app.domain.checkpoints import MANIFEST
from app.domain.ops import SaveWeights
from app.errors import OpError, Requeue
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from tests.unit.workers.checkpoints.test_snapshots import WITHIN_S, Shaky, local, train, waits_for_upload
from tests.unit.workers.conftest import MODEL, World, await_true, batch, step
from tests.unit.workers.sample.test_adapters import Make, RecordingBackend, make, store
from tests.unit.workers.sample.test_admission import BATCH, Engine
from tests.unit.workers.sample.test_runner import REQUEST, SESSION, admit, backend, runner
from tests.unit.workers.train.test_restore_faults import NoReplay, kill_by_restore, replay_alone, replay_due
from tests.unit.workers.train.test_scheduler import MERGED, A, B, handle, worker_of
from tests.unit.workers.train.test_scheduler import admit as admit_op
from workers.backends.sampling.base import RequestHandle, SamplerBackend

__all__ = ["backend", "make", "replay_alone", "replay_due", "store"]
STAGES = ("wait", "run", "write", "commit")


@pytest.fixture
def shaky(tmp_path: Path) -> Shaky:
    return Shaky(tmp_path / "shaky")


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tinsmith_{name}", labels) or 0.0


def die(world: World, seq: int, times: int) -> None:
    """Begins the Op in workers that die of it."""
    for number in range(times):
        worker = world.worker(f"dead/{number}")
        lease = world.oplog.acquire(MODEL, worker.parts.worker)
        world.oplog.next(lease, seq)
        world.client.delete(keys.lease(MODEL))


def stages(kind: str) -> dict[str, float]:
    """How often a stage of such an Op was measured, by stage."""
    return {stage: value("op_stage_seconds_count", kind=kind, stage=stage) for stage in STAGES}


def risen(kind: str, before: dict[str, float]) -> list[str]:
    """The stages, each as often as it was measured since."""
    return [stage for stage, count in stages(kind).items() for _ in range(int(count - before[stage]))]


def test_an_op_counts_once_in_each_of_its_stages_and_by_its_state(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    gradient, save = step()[0], SaveWeights("weights", "kept")
    for seq, op in enumerate([gradient, save, save], 1):
        world.admit(seq, op)
    before = {op.kind: stages(op.kind) for op in (gradient, save)}
    ended = {state: value("ops_total", kind=save.kind, state=state) for state in ("done", "failed")}
    for _ in range(2):
        assert not worker.handle(1).failed
    assert risen(gradient.kind, before[gradient.kind]) == ["wait", "run", "commit"]
    assert not worker.handle(2, save.kind).failed
    assert risen(save.kind, before[save.kind]) == ["wait", "run", "write", "commit"]
    assert worker.handle(3, save.kind).failed, "its name is taken"
    assert {state: value("ops_total", kind=save.kind, state=state) - ended[state] for state in ended} == {
        "done": 1,
        "failed": 1,
    }


def test_a_batch_counts_its_tokens_as_trained(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    before = value("tokens_total", use="trained")
    worker.handle(1)
    assert value("tokens_total", use="trained") == before + len(batch().tokens.values)


def test_models_that_share_a_pass_count_together(world: World):
    worker = worker_of(world, "a/1", merged_tokens=MERGED)
    for model_id in (A, B):
        admit_op(world, model_id, 1, step()[0])
    before = value("pass_ops_count"), value("pass_ops_sum")
    handle(worker, A, 1)
    assert (value("pass_ops_count"), value("pass_ops_sum")) == (before[0] + 1, before[1] + 2)


def test_a_model_counts_while_its_worker_owns_it(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    assert value("resident_models") == 1
    worker.owner.evict(MODEL)
    assert value("resident_models") == 0


def test_a_commit_counts_as_refused_where_another_worker_has_the_model(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    before, apply = value("refused_commits_total"), worker.backend.apply

    def overtaken(ops: Mapping[str, Any]) -> Any:
        world.client.delete(keys.lease(MODEL))
        world.oplog.acquire(MODEL, "b/1")
        return apply(ops)

    with monkeypatch.context() as patch:
        patch.setattr(worker.backend, "apply", overtaken)
        with pytest.raises(Requeue):
            worker.handle(1)
    assert value("refused_commits_total") == before + 1


def test_an_op_that_ends_counts_the_attempts_that_killed_its_workers(world: World):
    before = value("lost_attempts_total", kind="create_model")
    die(world, 0, 2)
    world.outlast(f"{MODEL}:0")
    assert not world.worker("a/1").handle(0, "create_model").failed
    assert value("lost_attempts_total", kind="create_model") == before + 2


def failures(kind: str) -> tuple[float, float, float]:
    """The Ops that were given up, all that failed, and the attempts that all of them lost."""
    return (
        value("given_up_ops_total", kind=kind),
        value("ops_total", kind=kind, state="failed"),
        value("lost_attempts_total", kind=kind),
    )


def more(kind: str, before: tuple[float, float, float]) -> list[float]:
    return [new - old for new, old in zip(failures(kind), before, strict=True)]


def test_an_op_that_is_given_up_is_counted_once_with_all_its_attempts(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    before = failures("create_model")
    die(world, 0, 3)
    worker = world.worker("a/1")
    with pytest.raises(Requeue):  # the last of these workers may only be cut off
        worker.handle(0, "create_model")
    world.outlast(f"{MODEL}:0")
    assert [worker.handle(0, "create_model").failed for _ in range(2)] == [True, True]
    assert more("create_model", before) == [1, 1, 3]


def test_ops_of_a_model_that_cannot_be_restored_are_counted_as_failed(replay_due: World):
    for seq in (3, 4):
        replay_due.admit(seq, step()[0])
    before = {kind: failures(kind) for kind in ("optim_step", "forward_backward")}
    kill_by_restore(replay_due)
    assert replay_due.worker("b/4").handle(4).failed
    assert more("optim_step", before["optim_step"]) == [1, 1, 3], "the workers died before it"
    assert more("forward_backward", before["forward_backward"]) == [0, 2, 0]


def test_an_op_of_a_model_that_is_lost_is_given_up_after_its_attempts(replay_due: World):
    before, worker = failures("optim_step"), replay_due.worker("b/1")
    NoReplay(worker, OpError("it does not fit"))
    for _ in range(2):
        with pytest.raises(Requeue):
            worker.handle(2, "optim_step")
    assert worker.handle(2, "optim_step").failed
    assert more("optim_step", before) == [1, 1, 2]


def test_a_sample_that_is_given_up_is_counted_once_with_all_its_attempts(world: World, backend: SamplerBackend):
    before = failures("sample")
    request = admit(world, 0)
    for number in range(3):
        world.oplog.claim_sample(request, f"dead/{number}")
        world.client.delete(keys.lease(request))
    successor = runner(world, backend, "s/1")
    with pytest.raises(Requeue):
        successor.handle(request, SESSION, "sample")
    world.outlast(request)
    assert successor.handle(request, SESSION, "sample").failed
    assert more("sample", before) == [1, 1, 3]


def test_a_restore_counts_once_with_each_op_that_it_runs_again(world: World):
    first = world.worker("a/1")
    first.handle(0, "create_model")
    for seq, op in enumerate([*step(0), *step(1)], 1):
        world.admit(seq, op)
        first.handle(seq, op.kind)
    before = value("restore_seconds_count"), value("replayed_ops_total")
    second = world.worker("a/2")
    second.owner.own(MODEL)
    assert (value("restore_seconds_count"), value("replayed_ops_total")) == (before[0] + 1, before[1] + 5)
    second.owner.own(MODEL)
    assert value("restore_seconds_count") == before[0] + 1, "a model that is here is not restored"


def test_changes_age_until_they_are_in_a_durable_snapshot(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    assert value("snapshot_age_seconds") == 0, "a new model has nothing to lose"
    for seq, op in enumerate(step(0), 1):
        world.admit(seq, op)
        worker.handle(seq, op.kind)
    age = value("snapshot_age_seconds")
    assert age > 0
    await_true(lambda: value("snapshot_age_seconds") > age, "it grows")
    worker.snapshots.settle(worker.owner.residents()[MODEL], within_s=60.0)
    assert value("snapshot_age_seconds") == 0


def test_changes_in_a_snapshot_that_cannot_be_uploaded_age_beside_newer_ones(world: World, shaky: Shaky):
    worker = world.worker("a/1", share=math.inf, store=shaky)
    worker.handle(0, "create_model")
    shaky.away = True
    train(world, worker, [0])
    began = time.monotonic()
    train(world, worker, [1])
    resident = worker.owner.residents()
    since_s = time.monotonic() - began
    assert worker.snapshots.age_s(resident) > since_s, "the first step is older than the second"
    shaky.away = False
    await_true(lambda: worker.snapshots.age_s(resident) == 0, "both are durable")


class Slow(FolderStore):
    """A folder store in which a snapshot is complete only when a test lets one more be."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "secret", "http://x")
        self.complete = threading.Semaphore(0)

    def put_new(self, key: str, source: Path | bytes) -> bool:
        if key.endswith(MANIFEST):
            assert self.complete.acquire(timeout=WITHIN_S)
        return super().put_new(key, source)


def test_steps_in_durable_snapshots_age_no_more_while_newer_snapshots_wait(world: World, tmp_path: Path):
    store = Slow(tmp_path / "slow")
    worker = world.worker("a/1", share=math.inf, store=store)
    worker.handle(0, "create_model")
    train(world, worker, [0])
    await_true(lambda: local(world) != [], "the first snapshot waits for the store")
    resident = worker.owner.residents()

    def step_during_an_upload(seed: int) -> None:
        began = time.monotonic()
        seq = train(world, worker, [seed])
        await_true(lambda: waits_for_upload(worker) == seq, "there is a newer snapshot before the upload ends")
        store.complete.release()
        await_true(lambda: worker.snapshots.age_s(resident) <= time.monotonic() - began, "older steps are durable")
        assert worker.snapshots.age_s(resident) > 0, "the newest step is not"

    for seed in (1, 2, 3):
        step_during_an_upload(seed)
    store.complete.release()
    await_true(lambda: worker.snapshots.age_s(resident) == 0, "all are durable")


def test_a_model_that_is_forgotten_while_ages_are_read_has_none(world: World):
    class Forgetful(dict[str, object]):
        """Forgets a model right after it was found."""

        def __contains__(self, model_id: object) -> bool:
            return self.pop(model_id, None) is not None

    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    train(world, worker, [0])
    worker.snapshots._tracks = Forgetful(worker.snapshots._tracks)
    assert worker.snapshots.age_s([MODEL]) > 0
    worker.snapshots.forget(MODEL)
    assert worker.snapshots.age_s([MODEL]) == 0


def test_a_lease_that_was_renewed_too_late_is_counted_once(world: World):
    before = value("lost_leases_total")
    keeper = world.worker("a/1", lease_s=3600).parts.keeper
    world.oplog.acquire(MODEL, "a/1")
    keeper.add(MODEL, time.monotonic() - 3600)
    keeper._renew()
    assert value("lost_leases_total") == before, "it is still held"
    keeper.add(MODEL, time.monotonic() - 3600)
    world.client.delete(keys.lease(MODEL))
    world.oplog.acquire(MODEL, "b/1")
    keeper._renew()
    keeper._renew()
    assert value("lost_leases_total") == before + 1


@pytest.mark.parametrize("how", ["paused", "ended"])
def test_a_lease_of_a_request_that_was_paused_or_has_ended_is_not_counted(world: World, how: str):
    before = value("lost_leases_total")
    keeper, stopped = world.worker("s/1", lease_s=3600).parts.keeper, threading.Event()
    request_id = admit(world, 0)
    asked = time.monotonic()
    entry = world.oplog.claim_sample(request_id, "s/1")
    assert entry is not None
    keeper.add(request_id, asked, stopped.set)
    if how == "paused":
        world.client.hset(keys.op(request_id), "ring", "paused")
    else:
        world.oplog.cancel_sample(request_id)
    keeper._renew()
    assert stopped.is_set()
    assert value("lost_leases_total") == before


def test_a_prompt_counts_as_prefilled_and_cached_tokens(
    world: World, backend: SamplerBackend, monkeypatch: pytest.MonkeyPatch
):
    sample = backend.sample
    monkeypatch.setattr(backend, "sample", lambda *args: replace(sample(*args), cached_tokens=1))
    uses = ("prompt", "prefilled", "cached", "sampled")
    before = {use: value("tokens_total", use=use) for use in uses}
    runner(world, backend, "s/1").handle(admit(world, 0), SESSION, "sample")
    counted = {use: value("tokens_total", use=use) - before[use] for use in uses}
    prompt, sampled = len(REQUEST.prompt), REQUEST.num_samples * REQUEST.max_tokens
    assert counted == {"prompt": prompt, "prefilled": prompt - 1, "cached": 1, "sampled": sampled}


def test_adapters_are_counted_where_they_are_and_as_they_are_used(make: Make):
    adapters = make(RecordingBackend(), most=2)
    before = {cache: value("adapter_uses_total", cache=cache) for cache in ("hit", "miss")}
    for prefix in ("a", "a", "b", "c"):
        with adapters.use(prefix, "me", RequestHandle()):
            pass
    found = {cache: value("adapter_uses_total", cache=cache) - before[cache] for cache in ("hit", "miss")}
    assert (found, value("loaded_adapters")) == ({"hit": 1, "miss": 3}, 2)


def test_the_batch_shows_how_full_it_is_and_who_waits():
    engine = Engine()
    for _ in range(BATCH + 3):
        engine.come("me")
    engine.await_inside(BATCH + 1)
    assert value("batch_capacity") == BATCH
    assert (value("batch_sequences"), value("batch_waiting")) == (BATCH + 1, 2)
    engine.abort(BATCH + 2)
    assert value("batch_waiting") == 1
    while engine.inside:
        engine.end(engine.inside[0][0])
    assert (value("batch_sequences"), value("batch_waiting")) == (0, 0)
