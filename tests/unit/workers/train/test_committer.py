"""A save delays the next step only for a copy of the state. Content and time of each commit stay as without it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import ids
from app.domain import codec, records
from app.domain.ops import LoadWeights, Op, SaveWeights
from app.domain.results import Result
from app.errors import NotFound, Unavailable
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.types import Lease
from tests.unit.workers.conftest import (
    LORA,
    MODEL,
    PROBE,
    Worker,
    World,
    add_model,
    await_true,
    logprob_bytes,
    probe,
    step,
    undisturbed,
)
from tests.unit.workers.train.test_turns import infinite_ratio
from workers.backends.training.base import ADAPTER_FILE, OPTIMIZER_FILE, Create
from workers.process.results import NotNow
from workers.train import committer

OTHER = "session:train:1"
SAVE = SaveWeights("weights", "kept")


class GatedStore(FolderStore):
    """Stores no checkpoint until its gate is `open`, and then raises `error` if there is one; snapshots pass. `asked`:
    a caller is or was at the gate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "secret", "http://x")
        self.asked, self.open = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def put_new(self, key: str, source: Path | bytes) -> bool:
        if "/snapshots/" not in key:
            self.asked.set()
            assert self.open.wait(60), "nobody opened the gate"
            if self.error:
                raise self.error
        return super().put_new(key, source)


class Ran:
    """The kinds of the Ops that the backend ran, by model, in order."""

    def __init__(self, worker: Worker) -> None:
        self._inner = worker.backend
        self.kinds: dict[str, list[str]] = {}
        self.captured = 0
        object.__setattr__(worker.runner._committer._executor, "backend", self)
        object.__setattr__(worker.runner._committer._executor.saver, "backend", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, ops: Mapping[str, Any]) -> Any:
        for model_id, op in ops.items():
            self.kinds.setdefault(model_id, []).append(getattr(op, "kind", type(op).__name__))
        return self._inner.apply(ops)

    def capture(self, model_id: str, *, optimizer: bool) -> Any:
        self.captured += 1
        return self._inner.capture(model_id, optimizer=optimizer)


@pytest.fixture
def store(world: World) -> Iterator[GatedStore]:
    store = GatedStore(world.folder / "objects")
    yield store
    store.open.set()


@pytest.fixture
def ring(store: GatedStore) -> Iterator[Callable[..., Future[Result | None]]]:
    """Handles a dispatch in a thread, like the task thread."""
    with ThreadPoolExecutor(1) as thread:

        def ring(worker: Worker, seq: int, kind: str = SAVE.kind, model_id: str = MODEL) -> Future[Result | None]:
            return thread.submit(worker.runner.handle, ids.request_id(model_id, seq), model_id, kind)

        yield ring
        store.open.set()


Ring = Callable[..., "Future[Result | None]"]


def admit(world: World, *ops: Op, first: int = 1, model_id: str = MODEL) -> None:
    for seq, op in enumerate(ops, first):
        payload = codec.encode(op)
        world.oplog.admit(model_id, seq, op.kind, payload, codec.digest(payload))


def applied(world: World, model_id: str = MODEL) -> int:
    return int(world.client.hget(keys.model(model_id), "applied"))


def attempts(world: World, seq: int) -> int:
    """Attempts of the Ops that the journal still holds; a snapshot has replaced the others."""
    return int(world.client.hget(keys.op(f"{MODEL}:{seq}"), "attempts") or 0)


def saved_files(world: World, name: str = "kept") -> dict[str, bytes]:
    stored = world.records.get(records.Checkpoint.namespace, f"tinker://{MODEL}/weights/{name}")
    assert stored is not None, f"{name} is not listed"
    folder = world.folder / "objects" / records.load(records.Checkpoint, stored).prefix
    return {file: (folder / file).read_bytes() for file in (ADAPTER_FILE, OPTIMIZER_FILE)}


def expected_files(world: World, seeds: list[int]) -> dict[str, bytes]:
    """The files of a save after these steps when nothing runs at the same time."""
    backend = world.worker("reference/0").backend
    for op in [Create(LORA), *(op for seed in seeds for op in step(seed))]:
        backend.apply({MODEL: op})
    folder = world.folder / "expected"
    folder.mkdir()
    backend.capture(MODEL, optimizer=True)(folder)
    return {file: (folder / file).read_bytes() for file in (ADAPTER_FILE, OPTIMIZER_FILE)}


def goes_on_waiting(worker: Worker, doorbell: Future[Result | None]) -> None:
    """The runner looks ten more times for work, finds none, and continues to wait."""
    saves, looks = worker.runner._saves, list[float]()
    await_any = saves.await_any

    def looked(seconds: float) -> None:
        looks.append(seconds)
        await_any(seconds)

    object.__setattr__(saves, "await_any", looked)
    await_true(lambda: len(looks) > 10, "it looks again")
    assert not doorbell.done()


def test_the_next_ops_run_while_a_save_is_written_and_are_committed_behind_it(
    world: World, store: GatedStore, ring: Ring, monkeypatch: pytest.MonkeyPatch
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE)
    worker.handle(2)
    ran, commits = Ran(worker), []
    commit = world.oplog.commit

    def noted(lease: Lease, seq: int, *rest: Any) -> None:
        commits.append(seq)
        commit(lease, seq, *rest)

    monkeypatch.setattr(world.oplog, "commit", noted)
    doorbell = ring(worker, 3)
    admit(world, *step(1), PROBE, first=4)
    await_true(lambda: ran.kinds.get(MODEL, [])[-1:] == ["forward"], "three Ops ran beside the save")
    assert applied(world) == 2
    assert [world.oplog.outcome(f"{MODEL}:{seq}") for seq in (3, 4, 5, 6)] == [None] * 4, "nothing is readable yet"
    assert not doorbell.done(), "the doorbell of a save ends when the save is terminal"
    store.open.set()
    saved = doorbell.result()
    assert saved is not None and not saved.failed
    assert commits == [3, 4, 5, 6]
    assert ran.kinds[MODEL] == ["forward_backward", "optim_step", "forward"], "each once"
    looked = worker.handle(6)
    assert looked is not None and logprob_bytes(looked.body) == undisturbed(world, [0, 1])
    assert saved_files(world) == expected_files(world, [0]), "the save holds what was there before it"


def test_other_models_run_and_commit_while_a_save_is_written(world: World, store: GatedStore, ring: Ring):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE)
    doorbell = ring(worker, 1)
    admit(world, *step(0), *step(1), *step(2), model_id=OTHER)
    await_true(lambda: applied(world, OTHER) == 6, "the other model went on without a doorbell of its own")
    assert not doorbell.done()
    store.open.set()
    assert doorbell.result() is not None


@pytest.mark.parametrize("next_is", ["a tick", "another doorbell"])
def test_a_save_begun_in_turn_holds_no_other_doorbell(world: World, store: GatedStore, ring: Ring, next_is: str):
    """The dispatch of another model ends with its own Op; the next dispatch commits the save."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, *step(0))
    worker.handle(1)
    admit(world, SAVE, model_id=OTHER)
    ran = Ran(worker)
    assert ring(worker, 2, "optim_step").result() is not None
    assert ran.captured == 1, "it had its turn"
    assert applied(world, OTHER) == 0
    store.open.set()
    await_true(lambda: worker.owner.residents()[OTHER].is_due, "it is written")
    if next_is == "a tick":
        worker.runner.see_to_saves()
    else:
        probe(worker, world, 3)
    assert applied(world, OTHER) == 1


def test_a_name_that_is_taken_fails_the_save_alone(world: World, store: GatedStore):
    store.open.set()
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, SAVE, *step(1))
    worker.handle(6)
    results = [world.oplog.outcome(f"{MODEL}:{seq}") for seq in (3, 4, 5, 6)]
    assert [bool(result and result.failed) for result in results] == [False, True, False, False]
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [0, 1])


def test_a_store_that_is_away_costs_what_ran_ahead_no_attempt_and_no_bit(world: World, store: GatedStore, ring: Ring):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, *step(1))
    ran = Ran(worker)
    doorbell = ring(worker, 3)
    await_true(lambda: ran.kinds.get(MODEL, []).count("optim_step") == 2, "a step ran ahead")
    store.error = Unavailable("the object store is away")
    store.open.set()
    with pytest.raises(NotNow, match="away"):
        doorbell.result()
    assert worker.owner.residents() == {}, "the state is ahead of the journal"
    before = len(ran.kinds[MODEL])
    for _ in range(4):  # more often than an Op has attempts
        with pytest.raises(NotNow, match="away"):
            worker.handle(5, "optim_step")
    replayed = ran.kinds[MODEL][before:]
    assert replayed == ["Create", "forward_backward", "optim_step"], "and behind a save that was put off nothing runs"
    store.error = None
    assert worker.handle(5, "optim_step") is not None
    assert [attempts(world, seq) for seq in (3, 4, 5)] == [0, 0, 0]
    assert logprob_bytes(probe(worker, world, 6)) == undisturbed(world, [0, 1])
    assert saved_files(world) == expected_files(world, [0])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_lease_that_is_lost_meanwhile_costs_nothing_but_the_work(
    world: World, store: GatedStore, ring: Ring, ahead: bool
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE)
    worker.handle(2)
    ran = Ran(worker)
    doorbell = ring(worker, 3)
    await_true(lambda: ran.captured == 1, "the save is under way")
    admit(world, *step(1), first=4)
    if ahead:
        await_true(lambda: ran.kinds.get(MODEL, [])[-1:] == ["optim_step"], "a step ran ahead")
    world.client.delete(keys.lease(MODEL))
    heir = world.worker("b/1")
    results = [heir.handle(seq) for seq in (3, 4, 5)]
    seen, files = world.head(), saved_files(world)
    store.open.set()
    with pytest.raises(NotNow):
        doorbell.result()
    assert world.head() == seen
    assert [world.oplog.outcome(f"{MODEL}:{seq}") for seq in (3, 4, 5)] == results
    assert saved_files(world) == files == expected_files(world, [0])
    assert logprob_bytes(probe(heir, world, 6)) == undisturbed(world, [0, 1])


def test_what_broke_a_worker_never_runs_ahead(world: World, store: GatedStore, ring: Ring):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0))
    world.client.hset(keys.op(f"{MODEL}:2"), "attempts", 1)
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way")
    goes_on_waiting(worker, doorbell)
    assert MODEL not in ran.kinds
    store.open.set()
    assert doorbell.result() is not None
    assert worker.handle(3, "optim_step") is not None
    assert logprob_bytes(probe(worker, world, 4)) == undisturbed(world, [0])


def test_nothing_runs_beside_a_save_that_broke_a_worker(world: World, store: GatedStore, ring: Ring):
    """If the save breaks the worker again, it harms no other Op."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE, *step(0))
    world.client.hset(keys.op(f"{MODEL}:1"), "attempts", 1)
    admit(world, *step(0), model_id=OTHER)
    worker.owner.residents()[OTHER].served += 3600  # the turn of OTHER comes after the save
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way")
    with pytest.raises(TimeoutError):
        doorbell.result(timeout=0.3)
    assert ran.kinds == {}
    store.open.set()
    assert doorbell.result() is not None


def test_what_fails_ahead_dooms_what_waits_as_it_would_have(world: World, store: GatedStore, ring: Ring):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    good, optim_step = step(1)
    admit(world, SAVE, infinite_ratio(), good, optim_step, *step(0))
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: MODEL in ran.kinds, "the first ran ahead")
    goes_on_waiting(worker, doorbell)
    assert ran.kinds[MODEL] == ["forward_backward"], "nothing runs behind a failure whose commit has to come first"
    store.open.set()
    assert doorbell.result() is not None
    worker.handle(6, "optim_step")
    results = [world.oplog.outcome(f"{MODEL}:{seq}") for seq in range(2, 7)]
    assert [bool(result and result.failed) for result in results] == [True, True, True, False, False]
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [0])


@pytest.mark.parametrize("kind", ["load_weights", "save_weights"])
def test_a_load_and_another_save_wait_for_the_save_before(world: World, store: GatedStore, ring: Ring, kind: str):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, *step(1))
    store.open.set()
    worker.handle(5, "optim_step")
    store.open.clear()
    stored = world.records.get(records.Checkpoint.namespace, f"tinker://{MODEL}/weights/kept")
    assert stored is not None
    prefix = records.load(records.Checkpoint, stored).prefix
    load = LoadWeights(f"tinker://{MODEL}/weights/kept", optimizer=True, prefix=prefix)
    second = SaveWeights("weights", "second") if kind == SAVE.kind else load
    admit(world, SaveWeights("weights", "first"), PROBE, second, first=6)
    ran = Ran(worker)
    doorbell = ring(worker, 8, kind)
    await_true(lambda: ran.kinds.get(MODEL) == ["forward"], "the probe ran ahead")
    goes_on_waiting(worker, doorbell)
    assert ran.kinds[MODEL] == ["forward"] and ran.captured == 1
    store.open.set()
    assert doorbell.result() is not None
    steps = [0, 1] if kind == SAVE.kind else [0]
    assert logprob_bytes(probe(worker, world, 9)) == undisturbed(world, steps)


def test_no_snapshot_is_taken_of_a_state_that_ran_ahead_of_its_commits(world: World, store: GatedStore, ring: Ring):
    """A snapshot of two steps with the seq of the first one would run the second step twice."""
    worker = world.worker("a/1", share=math.inf, store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0), *step(1), step(2)[0])
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 5, "all ran ahead")
    captured = ran.captured
    store.open.set()
    doorbell.result()
    assert applied(world) == 6
    assert ran.captured == captured
    admit(world, step(2)[1], first=7)
    worker.handle(7, "optim_step")
    assert ran.captured == captured + 1, "it waited for the next step"
    world.await_snapshot(7)
    world.client.delete(keys.lease(MODEL))
    assert logprob_bytes(probe(world.worker("b/1"), world, 8)) == undisturbed(world, [0, 1, 2])


@pytest.mark.parametrize(("in_time", "next_owner"), [(True, "b/1"), (False, "b/1"), (False, "a/2")])
def test_a_model_that_is_let_go_leaves_nothing_undone_and_no_attempt(
    world: World, store: GatedStore, ring: Ring, in_time: bool, next_owner: str
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0))
    worker.handle(2, "optim_step")
    admit(world, SAVE, *step(1), first=3)
    ran = Ran(worker)
    doorbell = ring(worker, 3)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 2, "a step ran ahead")
    worker.runner.leave()
    with pytest.raises(NotNow, match="about to end"):
        doorbell.result()
    if in_time:
        threading.Timer(0.05, store.open.set).start()
    worker.drain.in_order(120.0 if in_time else 0.5)
    assert applied(world) == (5 if in_time else 2)
    assert len(worker.rung) == (0 if in_time else 3), "what waits is rung"
    heir = world.worker(next_owner, store=FolderStore(world.folder / "objects", "secret", "http://x"))
    assert heir.handle(5, "optim_step") is not None
    assert [attempts(world, seq) for seq in (3, 4, 5)] == [0, 0, 0]
    assert logprob_bytes(probe(heir, world, 6)) == undisturbed(world, [0, 1])


def test_a_save_that_breaks_is_given_up_after_its_attempts_and_nothing_else(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    store.open.set()
    store.error = RuntimeError("no such thing")
    admit(world, *step(0), SAVE, *step(1))
    for tried in range(3):
        with pytest.raises(NotNow, match="RuntimeError"):
            worker.handle(5, "optim_step")
        assert attempts(world, 3) == tried + 1
    assert worker.handle(5, "optim_step") is not None
    saved = world.oplog.outcome(f"{MODEL}:3")
    assert saved is not None and saved.failed and json.loads(saved.body)["category"] == "server"
    assert [attempts(world, seq) for seq in (4, 5)] == [0, 0]
    assert logprob_bytes(probe(worker, world, 6)) == undisturbed(world, [0, 1])


def test_so_many_saves_are_written_at_a_time_and_no_more(
    world: World, store: GatedStore, ring: Ring, monkeypatch: pytest.MonkeyPatch
):
    """Each holds a copy of its model in memory."""
    monkeypatch.setattr(committer, "_MOST_SAVES", 1)
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE)
    admit(world, *step(0), SAVE, model_id=OTHER)
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: applied(world, OTHER) == 2, "what is no save goes on")
    goes_on_waiting(worker, doorbell)
    assert ran.captured == 1
    store.open.set()
    assert doorbell.result() is not None
    assert worker.runner.handle(f"{OTHER}:3", OTHER, SAVE.kind) is not None


def test_an_abandoned_save_is_over_before_its_model_is_saved_anew(world: World, store: GatedStore, ring: Ring):
    """Both saves would write the same generation, and on a GPU a replayed state may have other bits."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0))
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way")
    lapsed = worker.owner.residents()[MODEL]
    worker.keeper.drop(MODEL)  # as if the lease had expired: the same process restores the model
    await_true(lambda: worker.owner.residents().get(MODEL, lapsed) is not lapsed, "it was")
    goes_on_waiting(worker, doorbell)
    assert ran.captured == 1
    store.open.set()
    assert doorbell.result() is not None
    assert ran.captured == 2
    assert worker.handle(3, "optim_step") is not None
    assert logprob_bytes(probe(worker, world, 4)) == undisturbed(world, [0])


def test_a_batch_sent_again_ahead_stands_in_for_the_refused_one(world: World, store: GatedStore, ring: Ring):
    """The missing gradients of the next step are known up to the Ops that have run, committed or not."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    world.oplog.refuse(MODEL, 1, "too long", "lost_batch")
    admit(world, SAVE, *step(0), first=2)
    ran = Ran(worker)
    doorbell = ring(worker, 2)
    await_true(lambda: ran.kinds.get(MODEL) == ["forward_backward", "optim_step"], "a step ran ahead")
    store.open.set()
    assert doorbell.result() is not None
    stepped = worker.handle(4, "optim_step")
    assert stepped is not None and not stepped.failed
    assert logprob_bytes(probe(worker, world, 5)) == undisturbed(world, [0])


def test_a_model_that_is_deleted_in_mid_save_is_gone(world: World, store: GatedStore, ring: Ring):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0))
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 2, "a step ran ahead")
    RedisLifecycle(world.client, world.settings).end_model(MODEL)
    world.records.delete(records.Model.namespace, MODEL)
    store.error = NotFound("no such model")
    store.open.set()
    ended = doorbell.result()
    assert ended is not None and "run has ended" in json.loads(ended.body)["error"]
    assert worker.owner.residents() == {}


def test_only_so_many_ops_run_ahead(world: World, store: GatedStore, ring: Ring, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.train.scheduler._MOST_AHEAD", 2)
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, PROBE, PROBE, PROBE)
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: ran.kinds.get(MODEL) == ["forward"] * 2, "two ran")
    goes_on_waiting(worker, doorbell)
    assert ran.kinds[MODEL] == ["forward"] * 2
    store.open.set()
    assert doorbell.result() is not None


def test_an_adapter_there_is_no_room_to_hand_over_goes_the_same_way(world: World, store: GatedStore, ring: Ring):
    worker = world.worker("a/1", store=store, handover_bytes=0)
    worker.handle(0, "create_model")
    admit(world, SaveWeights("sampler_weights", "x", sampling_session_id="session:sample:0"), *step(0))
    ran = Ran(worker)
    doorbell = ring(worker, 1)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 2, "a step ran beside it")
    assert world.records.get(records.Sampler.namespace, "session:sample:0") is None
    store.open.set()
    assert doorbell.result() is not None
    assert world.records.get(records.Sampler.namespace, "session:sample:0") is not None
