"""Recovery of runs and checkpoints from the object store, after the state server was emptied."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest

from app import ids
from app.domain import ops
from app.domain.accounts import Project
from app.domain.checkpoints import MANIFEST, Manifest
from app.domain.ops import CreateModel, LoadWeights, ModelSpec, Op, SaveWeights
from app.domain.records import Checkpoint, Model, Session
from app.domain.results import Result
from app.errors import Gone
from app.services.recovery.rebuild import Rebuild, Restored
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.objects.notes import note
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import dump, load
from app.stores.redis.types import Lease
from tests.unit.workers.conftest import BASE, LORA, MODEL, PROBE, Worker, World, logprob_bytes, probe, step, undisturbed
from workers.maintenance.orphans import Orphans

SAVED = f"tinker://{MODEL}/weights/saved"
SNAPSHOT_SEQ = 4


def run(world: World, worker: Worker, model_id: str, seq: int, op: Op) -> Result:
    payload = ops.encode(op)
    request = world.oplog.admit(model_id, seq, op.kind, payload, ops.digest(payload)).request_id
    result = worker.runner.handle(request, model_id, op.kind)
    assert result is not None and not result.failed, result
    return result


def objects(world: World) -> FolderStore:
    return FolderStore(world.folder / "objects", "secret", "http://x")


def emptied(world: World) -> None:
    """Two steps with a snapshot after them, a checkpoint, and a step that is lost; then an emptied state server."""
    world.records.put(Session.namespace, "session", dump(Session("me", 0.0, display_name="mine")))
    worker = world.worker("a/1", share=1.0)
    worker.handle(0)
    for seq, op in enumerate([*step(0), *step(1)], 1):
        run(world, worker, MODEL, seq, op)
    world.await_snapshot(SNAPSHOT_SEQ)
    run(world, worker, MODEL, 5, SaveWeights("weights", "saved", user_metadata={"note": "kept"}))
    run(world, worker, MODEL, 6, SaveWeights("sampler_weights", "ephemeral-6", sampling_session_id="session:sample:0"))
    run(world, worker, MODEL, 7, step(9)[0])
    worker.shm_transfers.finish(MODEL, 60.0)  # an upload that ends after the emptying removes its files
    worker.owner.discard(MODEL)
    world.client.flushall()


def rebuild(world: World) -> Restored:
    lifecycle = RedisLifecycle(world.client, world.settings)
    return Rebuild(world.oplog, lifecycle, world.records, objects(world))()


def head(world: World, model_id: str = MODEL) -> dict[str, str]:
    return world.records.get(Model.namespace, model_id) or {}


def change_manifest(world: World, prefix: str, **changes: object) -> None:
    store = objects(world)
    manifest = Manifest.from_json(store.read(f"{prefix}/{MANIFEST}"))
    store.delete([f"{prefix}/{MANIFEST}"])
    store.put_new(f"{prefix}/{MANIFEST}", replace(manifest, **changes).to_json())


def saved_prefix(world: World) -> str:
    (key,) = [key for key in objects(world).list(f"models/{MODEL}/weights/") if key.endswith(MANIFEST)]
    return key.removesuffix(f"/{MANIFEST}")


def test_a_run_goes_on_from_its_snapshot_bit_for_bit(world: World):
    expected = undisturbed(world, [0, 1, 2])
    emptied(world)
    restored = rebuild(world)
    assert restored.runs == {MODEL: SNAPSHOT_SEQ}
    worker = world.worker("b/1")
    for seq, op in enumerate(step(2), SNAPSHOT_SEQ + 1):
        run(world, worker, MODEL, seq, op)
    assert logprob_bytes(probe(worker, world, SNAPSHOT_SEQ + 3)) == expected


def test_a_checkpoint_is_listed_and_loads_bit_for_bit(world: World):
    expected = undisturbed(world, [0, 1])
    emptied(world)
    assert rebuild(world).checkpoints == [SAVED]
    (path, fields), *others = world.records.list(Checkpoint.namespace, ids.checkpoint_path_prefix(MODEL))
    checkpoint = load(Checkpoint, fields)
    assert (path, others) == (SAVED, [])
    assert (checkpoint.owner, checkpoint.user_metadata, checkpoint.lora["rank"]) == ("me", {"note": "kept"}, LORA.rank)
    assert checkpoint.size_bytes > 0 and checkpoint.created > 0
    other = "session:train:1"
    world.oplog.create_model(other, dump(Model("me", "session", BASE, 0.0)))
    worker = world.worker("b/1")
    run(world, worker, other, 0, CreateModel(ModelSpec(BASE, LORA), SAVED, True, checkpoint.prefix))
    assert logprob_bytes(run(world, worker, other, 1, PROBE).body) == expected
    worker.owner.discard(other)


def test_a_run_is_as_it_was_but_for_what_its_manifests_do_not_say(world: World):
    emptied(world)
    rebuild(world)
    model = load(Model, head(world))
    assert (model.owner, model.session_id, model.base_model, model.state) == ("me", "session", BASE, "ready")
    assert model.lora["rank"] == LORA.rank
    session = load(Session, world.records.get(Session.namespace, "session") or {})
    assert (session.owner, session.status) == ("me", "open")
    assert world.client.zscore(keys.SESSIONS_HEARD, "session"), "its retention begins"


def test_a_local_snapshot_of_the_lost_history_is_never_taken_for_the_new_ones(world: World):
    """Only its machine has the snapshot; the new history reaches its seq with different steps."""
    expected = undisturbed(world, [0, 1, 2])
    emptied(world)
    folder = world.folder / "a" / "snapshots" / MODEL
    lost = folder / "6-5"
    shutil.copytree(folder / "4-1", lost)
    manifest = json.loads((lost / MANIFEST).read_text())
    (lost / MANIFEST).write_text(json.dumps({**manifest, "generation": "6-5", "seq": 6, "epoch": 5}))
    rebuild(world)
    worker = world.worker("b/1")
    for seq, op in enumerate(step(2), SNAPSHOT_SEQ + 1):
        run(world, worker, MODEL, seq, op)
    worker.owner.discard(MODEL)
    assert logprob_bytes(probe(world.worker("a/2"), world, SNAPSHOT_SEQ + 3)) == expected
    assert not lost.exists()


def test_nobody_who_owned_the_model_before_can_commit_to_it(world: World):
    emptied(world)
    objects(world).put_new(f"models/{MODEL}/weights/half/9-41/adapter_model.safetensors", b"never committed")
    rebuild(world)
    lease = world.oplog.acquire(MODEL, "b/1")
    assert isinstance(lease, Lease)
    assert lease.epoch > 41 + 1


def test_a_second_rebuild_changes_nothing(world: World):
    emptied(world)
    rebuild(world)
    worker = world.worker("b/1")
    run(world, worker, MODEL, SNAPSHOT_SEQ + 1, step(2)[0])
    world.records.delete(Checkpoint.namespace, SAVED)
    before = {key: world.client.dump(key) for key in world.client.keys("*") if b"lease" not in key}
    again = rebuild(world)
    assert (again.runs, again.checkpoints, again.known) == ({}, [], 1)
    assert {key: world.client.dump(key) for key in before} == before


def test_one_that_was_cut_off_is_finished_by_the_next(world: World, monkeypatch: pytest.MonkeyPatch):
    emptied(world)
    with monkeypatch.context() as cut:
        cut.setattr(type(world.oplog), "create_model", lambda *_: pytest.fail("the process died here"))
        with pytest.raises(pytest.fail.Exception):
            rebuild(world)
    assert rebuild(world).runs == {MODEL: SNAPSHOT_SEQ}
    assert world.records.get(Checkpoint.namespace, SAVED)


def copy_files(world: World, source: str, target: str) -> None:
    """Copies files; existing ones at `target` stay."""
    store = objects(world)
    for key in store.list(f"{source}/"):
        store.put_new(key.replace(source, target), store.read(key))


def test_of_an_overwritten_path_the_newest_generation_comes_back(world: World):
    emptied(world)
    newest = saved_prefix(world)
    older = f"models/{MODEL}/weights/saved/9-0"
    copy_files(world, newest, older)
    change_manifest(world, older, seq=9, epoch=0)
    rebuild(world)
    assert load(Checkpoint, world.records.get(Checkpoint.namespace, SAVED) or {}).prefix == newest


def test_a_snapshot_that_is_not_whole_is_left_for_the_one_before(world: World):
    emptied(world)
    store = objects(world)
    (manifest,) = [key for key in store.list(f"models/{MODEL}/snapshots/4/") if key.endswith(MANIFEST)]
    newest, older = manifest.removesuffix(f"/{MANIFEST}"), f"models/{MODEL}/snapshots/2/2-1"
    copy_files(world, newest, older)
    change_manifest(world, older, seq=2)
    store.delete([f"{newest}/adapter_model.safetensors"])
    restored = rebuild(world)
    assert restored.runs == {MODEL: 2}
    assert restored.damaged == [newest]


def test_a_run_without_a_snapshot_keeps_its_checkpoints_and_takes_no_calls(world: World):
    expected = undisturbed(world, [0, 1])
    emptied(world)
    store = objects(world)
    store.delete(store.list(f"models/{MODEL}/snapshots/"))
    restored = rebuild(world)
    assert (restored.runs, restored.ended, restored.checkpoints) == ({}, [MODEL], [SAVED])
    with pytest.raises(Gone):
        world.oplog.acquire(MODEL, "b/1")
    worker = world.worker("b/1")
    other = "session:train:1"
    world.oplog.create_model(other, dump(Model("me", "session", BASE, 0.0)))
    prefix = saved_prefix(world)
    run(world, worker, other, 0, CreateModel(ModelSpec(BASE, LORA)))
    run(world, worker, other, 1, LoadWeights(SAVED, True, prefix))
    assert logprob_bytes(run(world, worker, other, 2, PROBE).body) == expected
    worker.owner.discard(other)


def test_what_expired_does_not_come_back_and_what_was_kept_since_does(world: World):
    emptied(world)
    prefix, now = saved_prefix(world), world.records.now()
    change_manifest(world, prefix, expires_at=now - 1)
    restored = rebuild(world)
    assert (restored.checkpoints, restored.expired) == ([], 1)
    world.client.flushall()
    note(objects(world), prefix, "expires_at", now - 3600, now - 1800)
    note(objects(world), prefix, "expires_at", now, None)
    assert rebuild(world).checkpoints == [SAVED]
    assert json.loads((world.records.get(Checkpoint.namespace, SAVED) or {})["expires_at"]) is None


def test_a_time_to_live_comes_back_with_the_checkpoint(world: World):
    emptied(world)
    expires = world.records.now() + 7200
    change_manifest(world, saved_prefix(world), expires_at=expires)
    rebuild(world)
    assert load(Checkpoint, world.records.get(Checkpoint.namespace, SAVED) or {}).expires_at == expires


def test_no_orphan_sweep_takes_what_a_rebuild_restored_or_would_restore(world: World):
    emptied(world)
    hasty = EngineSettings(orphan_s=0.001)
    store = objects(world)
    before = set(store.list(""))

    def sweep() -> None:
        lifecycle = RedisLifecycle(world.client, hasty)
        for _ in range(3):
            payloads = RedisPayloads(world.client, hasty, store)
            Orphans(world.oplog, lifecycle, world.records, payloads, store, hasty).sweep()
            time.sleep(0.01)

    sweep()
    assert set(store.list("")) == before
    rebuild(world)
    sweep()
    left = {key.rpartition("/")[0] for key in store.list("")}
    assert left == {saved_prefix(world), head(world)["snapshot"]}


def test_a_saved_manifest_says_when_it_expires(world: World):
    worker = world.worker("a/1")
    worker.handle(0)
    run(world, worker, MODEL, 1, SaveWeights("weights", "saved", 3600))
    record = load(Checkpoint, world.records.get(Checkpoint.namespace, SAVED) or {})
    manifest = Manifest.from_json(objects(world).read(f"{record.prefix}/{MANIFEST}"))
    assert manifest.expires_at == record.expires_at
    assert abs(manifest.expires_at - world.records.now() - 3600) < 600


def test_a_save_without_a_ttl_has_that_of_its_project_and_a_rebuild_knows_whose_it_is(world: World):
    limits = {"checkpoint_ttl_s": 7200}
    world.records.put(Project.namespace, "me", dump(Project("me", "org", "kettles", 0.0, limits=limits)))
    worker = world.worker("a/1")
    worker.handle(0)
    for seq, (name, ttl_s) in enumerate({"projects": None, "own": 3600, "moved": None, "kept": None}.items(), 1):
        run(world, worker, MODEL, seq, SaveWeights("weights", name, ttl_s))

    def expiries() -> dict[str, tuple[float | None, bool]]:
        found = {path.rpartition("/")[2]: load(Checkpoint, row) for path, row in world.records.list("checkpoints")}
        ages = {name: one.expires_at and round(one.expires_at - created[name], -2) for name, one in found.items()}
        return {name: (ages[name], one.counts) for name, one in found.items()}

    saved = {path.rpartition("/")[2]: load(Checkpoint, row) for path, row in world.records.list("checkpoints")}
    created = {name: one.created for name, one in saved.items()}
    assert expiries() == dict.fromkeys(("projects", "moved", "kept"), (7200, True)) | {"own": (3600, False)}
    now = world.records.now()
    note(objects(world), saved["moved"].prefix, "expires_at", now, created["moved"] + 3600)
    note(objects(world), saved["kept"].prefix, "expires_at", now, None)
    worker.owner.discard(MODEL)
    world.client.flushall()
    rebuild(world)
    assert expiries() == {
        "projects": (7200, True),
        "own": (3600, False),
        "moved": (3600, False),
        "kept": (None, False),
    }


def test_a_manifest_that_says_nothing_new_is_read_by_earlier_versions(world: World):
    emptied(world)
    assert "expiry_by" not in json.loads(objects(world).read(f"{saved_prefix(world)}/{MANIFEST}"))


def test_a_manifest_from_before_expiry_was_noted_is_read(world: World):
    emptied(world)
    store, key = objects(world), f"{saved_prefix(world)}/{MANIFEST}"
    raw = json.loads(store.read(key))
    del raw["expires_at"]
    store.delete([key])
    store.put_new(key, json.dumps(raw).encode())
    assert rebuild(world).checkpoints == [SAVED]
