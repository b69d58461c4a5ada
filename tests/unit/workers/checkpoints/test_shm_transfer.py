"""New weights can be sampled before they are in the object store, and reach it whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from app.domain.checkpoints import MANIFEST, UNHASHED
from app.domain.ops import SaveWeights
from app.domain.records import Sampler, ShmTransfer
from app.errors import ServerOpError, Unavailable
from app.stores.disk import Disk
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import load
from tests.unit.workers.conftest import LORA, MODEL, Worker, World, await_true, logprob_bytes, probe, step, undisturbed
from tests.unit.workers.train.saves import GatedStore, admit, applied, store
from workers.backends.training.base import ADAPTER_FILE, Create
from workers.checkpoints import shm_transfer, transfer
from workers.checkpoints.shm_transfer import ShmFolder
from workers.sample import adapter_files
from workers.sample.adapter_files import AdapterFiles

__all__ = ["store"]  # the fixture
SAMPLER = "session:sample:0"
SAVE = SaveWeights("sampler_weights", "ephemeral-3", sampling_session_id=SAMPLER)


@pytest.fixture(autouse=True)
def dies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed process leaves its thread in the store; a dead process would leave nothing."""
    monkeypatch.setattr(shm_transfer, "_CLOSE_S", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_PATIENCE_S", 0.1)


def transferred(worker: Worker, world: World, *seeds: int) -> str:
    """Runs a step for each seed, and commits a save for sampling. Returns the save's prefix."""
    admit(world, *(op for seed in seeds for op in step(seed)), SAVE)
    assert worker.handle(2 * len(seeds) + 1, SAVE.kind) is not None
    return prefix_of(world)


def prefix_of(world: World, sampler: str = SAMPLER) -> str:
    stored = world.records.get(Sampler.namespace, sampler)
    assert stored is not None
    return load(Sampler, stored).prefix


def size_on_record(world: World) -> int:
    return int((world.records.get(Sampler.namespace, SAMPLER) or {})["size_bytes"])


def on_record(world: World) -> list[str]:
    return [prefix for prefix, _ in world.records.list(ShmTransfer.namespace)]


def await_upload(world: World) -> None:
    await_true(lambda: not on_record(world), "the upload ends")


def files(world: World, store: FolderStore, machine: str, asked: Callable[[str], None] = print) -> AdapterFiles:
    """Adapter files of a sampler on a machine of that name."""
    transfers = ShmFolder(world.folder / "handover" / machine, 2**30)
    cache = Disk("the cache", world.folder / "sampler" / machine, 0)
    return AdapterFiles(store, world.records, transfers, cache, 2**30, asked)


def expected(world: World, *seeds: int) -> bytes:
    """The adapter's file after these steps."""
    backend = world.worker("reference/0").backend
    for op in [Create(LORA), *(op for seed in seeds for op in step(seed))]:
        backend.apply({MODEL: op})
    folder = world.folder / "expected"
    folder.mkdir(exist_ok=True)
    backend.capture(MODEL, optimizer=False)(folder)
    return (folder / ADAPTER_FILE).read_bytes()


def healthy(world: World) -> FolderStore:
    """The object store, without a gate."""
    return FolderStore(world.folder / "objects", "secret", "http://x")


def stored_adapter(world: World, prefix: str) -> bytes:
    """The complete adapter in the object store."""
    store = healthy(world)
    manifest = transfer.read_manifest(store, prefix)
    content = store.read(f"{prefix}/{ADAPTER_FILE}")
    assert manifest.files[ADAPTER_FILE].sha256 == hashlib.sha256(content).hexdigest()
    return content


def test_weights_are_sampled_on_their_machine_before_the_object_store_has_them(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    assert applied(world) == 3, "the save is committed while the store takes nothing"
    assert store.list(prefix) == [] and on_record(world) == [prefix]
    written = worker.shm_transfers._folder.find(prefix)
    assert written is not None
    entries = transfer.transferred(written).files
    assert {entry.sha256 for entry in entries.values()} == {""}, "no sampler waits for a hash"
    wanted = expected(world, 0)
    with files(world, store, "a").use(prefix) as folder:
        assert (folder / ADAPTER_FILE).read_bytes() == wanted
        store.open.set()
        await_upload(world)
    assert stored_adapter(world, prefix) == wanted
    assert size_on_record(world) == transfer.read_manifest(store, prefix).size
    with files(world, store, "b").use(prefix) as folder:
        assert (folder / ADAPTER_FILE).read_bytes() == wanted, "and elsewhere from the store"


def test_the_journal_reaches_back_before_what_is_not_uploaded_yet(world: World, store: GatedStore):
    """Otherwise nothing could make the weights again."""
    worker = world.worker("a/1", share=math.inf, store=store)
    transferred(worker, world, 0)
    world.await_snapshot(2)
    admit(world, *step(1), first=4)
    worker.handle(5, "optim_step")
    await_true(lambda: store.list(f"models/{MODEL}/snapshots/5/5-1/{MANIFEST}"), "the snapshot behind it is stored")
    assert int(world.head()[b"snapshot_seq"]) == 2
    with pytest.raises(Unavailable, match="is not uploaded yet"):
        world.oplog.set_snapshot(worker.owner.residents()[MODEL].lease, 5, "elsewhere")
    store.open.set()
    world.await_snapshot(5)


@pytest.mark.parametrize("snapshots_too", [True, False])
def test_a_machine_that_is_lost_before_the_upload_loses_nothing(world: World, store: GatedStore, snapshots_too: bool):
    """Another machine makes the same weights again, and the run goes on."""
    worker = world.worker("a/1", share=math.inf if snapshots_too else 0.02, store=store)
    prefix = transferred(worker, world, 0)
    admit(world, *step(1), first=4)
    worker.handle(5, "optim_step")
    worker.shm_transfers.close()
    world.client.delete(keys.lease(MODEL))
    successor = world.worker("b/1", store=healthy(world))
    assert successor.handle(3, "catch_up") is not None
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)
    assert logprob_bytes(probe(successor, world, 6)) == undisturbed(world, [0, 1])


def test_a_process_that_dies_before_the_upload_leaves_it_to_the_next_on_its_machine(world: World, store: GatedStore):
    """The next process owns no model yet."""
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    worker.shm_transfers.close()
    world.worker("a/2", store=healthy(world))
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_a_local_snapshot_behind_a_lost_transfer_is_not_used(world: World, store: GatedStore):
    """A reboot empties the memory, not the disk: a snapshot on the disk would skip the save."""
    worker = world.worker("a/1", share=math.inf, store=store)
    prefix = transferred(worker, world, 0)
    admit(world, *step(1), first=4)
    worker.handle(5, "optim_step")
    local = world.folder / "a" / "snapshots" / MODEL / "5-1"
    await_true(local.is_dir, "a snapshot behind the save is on the disk")
    worker.shm_transfers.close()
    worker.snapshots.close()
    shutil.rmtree(world.folder / "handover")
    again = world.worker("a/2", store=healthy(world))
    assert again.handle(3, "catch_up") is not None
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)
    assert logprob_bytes(probe(again, world, 6)) == undisturbed(world, [0, 1])


def test_memory_that_is_cleared_under_a_living_trainer_costs_a_replay(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    store.error = Unavailable("away")
    store.open.set()
    prefix = transferred(worker, world, 0)
    shutil.rmtree(world.folder / "handover")
    store.error = None
    await_true(worker.shm_transfers.lost, "the upload finds nothing to send")
    worker.on_tick()
    assert worker.owner.residents() == {}
    assert worker.handle(3, "catch_up") is not None
    await_upload(world)
    worker.on_tick()
    assert MODEL in worker.owner.residents(), "and it stays"
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_without_room_a_save_is_uploaded_before_its_commit(
    world: World, store: GatedStore, caplog: pytest.LogCaptureFixture
):
    worker = world.worker("a/1", store=store, handover_bytes=0)
    threading.Timer(0.2, store.open.set).start()
    prefix = transferred(worker, world, 0)
    assert store.open.is_set() and on_record(world) == []
    assert size_on_record(world) == transfer.read_manifest(store, prefix).size
    assert stored_adapter(world, prefix) == expected(world, 0)
    assert "shared-memory" not in caplog.text, "a folder of no bytes is what the settings ask for"


def test_what_is_uploaded_makes_room_for_what_comes(world: World, store: GatedStore):
    """A container's shared memory may be too small for two."""
    store.open.set()
    worker = world.worker("a/1", store=store)
    folder = worker.shm_transfers._folder
    prefix = transferred(worker, world, 0)
    await_upload(world)
    worker.shm_transfers.finish(MODEL, 60)
    written = folder.find(prefix)
    assert written is not None
    size = sum(path.stat().st_size for path in written.iterdir())
    object.__setattr__(folder, "most_bytes", size * 3 // 2)
    other = SaveWeights("sampler_weights", "ephemeral-4", sampling_session_id="session:sample:1")
    admit(world, other, first=4)
    store.open.clear()
    assert worker.handle(4, other.kind) is not None
    assert len(on_record(world)) == 1
    assert folder.find(prefix) is None


def test_without_room_what_was_lost_is_uploaded_as_the_model_comes_back(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    worker.shm_transfers.close()
    world.client.delete(keys.lease(MODEL))
    successor = world.worker("b/1", store=healthy(world), handover_bytes=0)
    assert successor.handle(3, "catch_up") is not None
    assert on_record(world) == []
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_named_saves_are_uploaded_before_their_commit(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SaveWeights("sampler_weights", "named"))
    threading.Timer(0.2, store.open.set).start()
    worker.handle(3, SAVE.kind)
    assert store.open.is_set() and on_record(world) == []


def test_a_store_that_was_away_has_everything_once_it_is_back(world: World, store: GatedStore):
    """Saves and steps went on meanwhile."""
    worker = world.worker("a/1", store=store)
    store.error = Unavailable("away")
    store.open.set()
    for number in range(3):
        name = f"ephemeral-{3 * number + 3}"
        save = SaveWeights("sampler_weights", name, sampling_session_id=f"session:sample:{number}")
        admit(world, *step(number), save, first=3 * number + 1)
        assert worker.handle(3 * number + 3, save.kind) is not None
    prefixes = on_record(world)
    assert len(prefixes) == 3
    store.error = None
    await_upload(world)
    assert [stored_adapter(world, prefix) for prefix in prefixes] == [
        expected(world, *range(number + 1)) for number in range(3)
    ]
    left = list(worker.shm_transfers._folder.prefixes())
    assert left == prefixes[-1:], "the newest stays at hand, the others need their memory no more"


def test_a_worker_that_is_asked_to_end_uploads_first_within_its_time(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    threading.Timer(0.2, store.open.set).start()
    worker.drain.settle_and_release(120.0)
    assert on_record(world) == []
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_a_worker_that_is_asked_to_end_leaves_the_rest_to_the_journal(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    worker.drain.settle_and_release(0.2)
    assert on_record(world) == [prefix]
    successor = world.worker("b/1", store=healthy(world))
    successor.handle(3, "catch_up")
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_two_owners_that_upload_at_once_agree_on_one_of_their_copies(world: World, tmp_path: Path):
    """On a GPU a replay may give different last bits; a manifest of one owner over the other's file would be damage."""
    store = healthy(world)
    worker = world.worker("a/1", store=store)
    worker.shm_transfers.close()
    prefix = transferred(worker, world, 0)
    mine = worker.shm_transfers._folder.find(prefix)
    assert mine is not None
    theirs = tmp_path / "theirs"
    shutil.copytree(mine, theirs)
    content = bytearray((theirs / ADAPTER_FILE).read_bytes())
    content[-1] ^= 1
    (theirs / ADAPTER_FILE).write_bytes(content)
    (theirs / UNHASHED).unlink()
    about = {"path": "", "generation": "3-1", "model_id": MODEL, "owner": "me", "base_model": "base"}
    transfer.seal(theirs, transfer.describe(theirs, **about, lora=LORA, seq=3, epoch=1, hashed=False), UNHASHED)
    store.put_new(f"{prefix}/{ADAPTER_FILE}", theirs / ADAPTER_FILE)  # they are half-way when this upload begins
    transfer.complete(store, prefix, mine)
    transfer.complete(store, prefix, theirs)
    assert stored_adapter(world, prefix) == bytes(content)


@pytest.mark.usefixtures("impatient")
def test_a_sampler_elsewhere_waits_and_has_the_model_owned(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    asked: list[str] = []
    sampler = files(world, store, "b", asked.append)
    with pytest.raises(Unavailable, match="not in the object store yet"), sampler.use(prefix):
        pass
    assert asked == [prefix]
    store.open.set()
    await_upload(world)
    with sampler.use(prefix) as folder:
        assert (folder / ADAPTER_FILE).read_bytes() == expected(world, 0)


def test_an_upload_that_ends_meanwhile_is_waited_for(world: World, store: GatedStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter_files, "_PATIENCE_S", 60.0)
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    threading.Timer(0.3, store.open.set).start()
    with files(world, store, "b").use(prefix) as folder:
        assert (folder / ADAPTER_FILE).read_bytes() == expected(world, 0)


def test_the_end_of_a_run_ends_its_transfers(world: World, store: GatedStore):
    """No request waits for them forever, and no file of them is left."""
    worker = world.worker("a/1", store=store)
    prefix = transferred(worker, world, 0)
    assert store.asked.wait(60), "the upload is under way"
    RedisLifecycle(world.client, world.settings).end_model(MODEL)
    assert on_record(world) == []
    with pytest.raises(ServerOpError, match="gone"), files(world, store, "b").use(prefix):
        pass
    store.open.set()
    await_true(lambda: worker.shm_transfers._folder.find(prefix) is None, "the memory is free")
    assert store.list(prefix) == []


def test_in_flight_samplers_of_a_model_follow_its_newest_save_and_a_snapshot_stays(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    names = {"session:sample:0": True, "session:sample:1": False, "session:sample:2": True}
    prefixes = []
    pins: dict[str, list[str | None]] = {name: [] for name in names}
    for number, (name, inflight) in enumerate(names.items()):
        save = SaveWeights("sampler_weights", f"ephemeral-{number + 1}", sampling_session_id=name, inflight=inflight)
        admit(world, save, first=number + 1)
        worker.handle(number + 1, save.kind)
        prefixes.append(prefix_of(world, name))
        for there in list(names)[: number + 1]:
            request = f"{there}:{number}"
            world.oplog.admit_sample(request, there, "me", "sample.base", b"asked", "digest")
            entry = world.oplog.claim_sample(request, f"s/{number}")
            assert entry is not None
            pins[there].append(entry.adapter)
    assert pins == {
        "session:sample:0": [prefixes[0], prefixes[0], prefixes[2]],
        "session:sample:1": [prefixes[1], prefixes[1]],
        "session:sample:2": [prefixes[2]],
    }


def test_a_request_keeps_the_version_it_was_admitted_for(world: World, store: GatedStore):
    """This holds for every sampler, and however often the client asks again."""
    worker = world.worker("a/1", store=store)
    first = SaveWeights("sampler_weights", "ephemeral-1", sampling_session_id=SAMPLER, inflight=True)
    second = SaveWeights("sampler_weights", "ephemeral-2", sampling_session_id="session:sample:1", inflight=True)
    admit(world, first)
    worker.handle(1, first.kind)
    world.oplog.admit_sample(f"{SAMPLER}:0", SAMPLER, "me", "sample.base", b"asked", "digest")
    admit(world, second, first=2)
    worker.handle(2, second.kind)
    assert not world.oplog.admit_sample(f"{SAMPLER}:0", SAMPLER, "me", "sample.base", b"asked", "digest").fresh
    for sampler in ("a/1", "b/1"):
        entry = world.oplog.claim_sample(f"{SAMPLER}:0", sampler)
        assert entry is not None and entry.adapter == prefix_of(world)
        world.client.delete(keys.lease(f"{SAMPLER}:0"))
