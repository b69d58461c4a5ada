"""Rebuild from odd objects, and with a state server that was set back to an earlier state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from app.domain.checkpoints import MANIFEST
from app.domain.records import Checkpoint, Model, Session
from app.domain.results import Result
from app.services.recovery.rebuild import Rebuild, Restored
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump, load
from app.stores.redis.types import Lease

MODEL, GOOD = "session:train:0", "good:train:0"
SETTINGS = EngineSettings()


def path_of(name: str, model: str = MODEL) -> str:
    return f"tinker://{model}/weights/{name}"


@dataclass
class Installation:
    client: redis.Redis
    store: FolderStore
    oplog: RedisOpLog
    records: RedisRecords

    def write(self, rest: str, seq: int, epoch: int, model: str = MODEL, says: dict[str, Any] | None = None) -> str:
        """Writes a snapshot ("snapshots/6") or a checkpoint ("weights/a"). `says`: further fields of its manifest."""
        prefix = f"models/{model}/{rest}/{seq}-{epoch}"
        manifest = {
            "path": "" if rest.startswith("snapshots") else f"tinker://{model}/{rest}",
            "generation": f"{seq}-{epoch}",
            "model_id": model,
            "owner": "me",
            "base_model": "base",
            "lora": {"rank": 4},
            "seq": seq,
            "epoch": epoch,
            "created": f"2026-01-01T00:00:{seq:02}+00:00",
            "files": {"adapter": {"size": 1, "sha256": "0"}},
            "threads": 2,
            "cpu": "cpu",
            "schema_version": 1,
        }
        self.store.put_new(f"{prefix}/adapter", b"x")
        self.store.put_new(f"{prefix}/{MANIFEST}", json.dumps(manifest | (says or {})).encode())
        return prefix

    def rebuild(self) -> Restored:
        return Rebuild(self.oplog, RedisLifecycle(self.client, SETTINGS), self.records, self.store)()

    def set_back(self, epoch: int = 3, applied: int = 10) -> None:
        """Sets the state server back: it knows an earlier state of the run, and a checkpoint "old" of that time."""
        self.records.put_new(Session.namespace, "session", dump(Session("me", 0.0)))
        head = {"epoch": str(epoch), "applied": str(applied)}
        self.oplog.create_model(MODEL, {**dump(Model("me", "session", "base", 0.0, "ready", {"rank": 4})), **head})
        old = Checkpoint("me", MODEL, "weights", "base", f"models/{MODEL}/weights/old/7-2", 1.0, 1, {}, ["adapter"])
        self.records.put(Checkpoint.namespace, path_of("old"), dump(old))

    def prefix(self, name: str) -> str | None:
        stored = self.records.get(Checkpoint.namespace, path_of(name))
        return load(Checkpoint, stored).prefix if stored else None

    def lease(self, worker: str = "a/1") -> Lease:
        lease = self.oplog.acquire(MODEL, worker)
        assert isinstance(lease, Lease)
        return lease


@pytest.fixture
def installation(client: redis.Redis, tmp_path: Path) -> Installation:
    store = FolderStore(tmp_path, "", "")
    return Installation(client, store, RedisOpLog(client, SETTINGS), RedisRecords(client, SETTINGS))


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("snapshots/6", {"created": "yesterday"}),
        ("snapshots/6", {"created": None}),
        ("snapshots/6", {"created": "2026-01-01T00:00:00"}),
        ("snapshots/6", {"path": path_of("w")}),
        ("snapshots/6", {"seq": 9}),
        ("snapshots/6", {"epoch": 2}),
        ("snapshots/6", {"owner": 7}),
        ("snapshots/6", {"lora": {"rank": "many"}}),
        ("weights/w", {"model_id": GOOD, "path": path_of("w", GOOD)}),
        ("weights/w", {"path": path_of("other")}),
        ("weights/w", {"files": {"adapter": {"size": "big", "sha256": "0"}}}),
        ("weights/w", {"expires_at": "soon"}),
        ("weights/w", {"user_metadata": 5}),
        ("logs/w", {"path": f"tinker://{MODEL}/logs/w"}),
        ("weights/-w", {"path": path_of("-w")}),
    ],
)
def test_an_odd_manifest_counts_as_damaged_and_stops_nothing(
    installation: Installation, rest: str, says: dict[str, Any]
):
    installation.write("snapshots/6", 6, 1, model=GOOD)
    odd = installation.write(rest, 6, 1, says=says)
    restored = installation.rebuild()
    assert (restored.runs, restored.ended, restored.checkpoints, restored.damaged) == ({GOOD: 6}, [], [], [odd])
    assert [session for session, _ in installation.records.list(Session.namespace)] == ["good"]


def test_a_folder_that_is_no_runs_counts_as_damaged(installation: Installation):
    installation.write("snapshots/6", 6, 1, model=GOOD)
    odd = installation.write("snapshots/6", 6, 1, model="foo")
    restored = installation.rebuild()
    assert (restored.runs, restored.damaged) == ({GOOD: 6}, [odd])


@pytest.mark.parametrize("content", [b"[]", b"", b"\xff\xfe", b'{"schema_version": 1}', b'{"schema_version": 2}'])
def test_what_is_no_manifest_counts_as_damaged(installation: Installation, content: bytes):
    installation.write("snapshots/6", 6, 1, model=GOOD)
    prefix = f"models/{MODEL}/snapshots/6/6-1"
    installation.store.put_new(f"{prefix}/{MANIFEST}", content)
    restored = installation.rebuild()
    assert (restored.runs, restored.damaged) == ({GOOD: 6}, [prefix])


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b'{"expires_at": "soon"}'])
def test_a_bad_note_of_an_expiry_leaves_its_checkpoint_out(installation: Installation, note: bytes):
    installation.write("snapshots/6", 6, 1)
    odd = installation.write("weights/w", 7, 1)
    installation.store.put_new(f"{odd}/expiry-1.json", note)
    restored = installation.rebuild()
    assert (restored.runs, restored.checkpoints, restored.damaged) == ({MODEL: 6}, [], [odd])


def test_a_number_no_run_can_reach_is_not_taken_for_an_epoch(installation: Installation):
    installation.write("snapshots/6", 6, 1)
    installation.store.put_new(f"models/{MODEL}/weights/w/7-99999999999999999999/adapter", b"x")
    assert installation.rebuild().runs == {MODEL: 6}
    assert installation.lease().epoch < 2**53


@pytest.mark.parametrize(("seq", "epoch"), [(20, 5), (8, 5), (20, 3), (11, 3)])
def test_what_was_saved_since_an_old_backup_is_restored(installation: Installation, seq: int, epoch: int):
    installation.set_back()
    lost = installation.write("weights/new", seq, epoch)
    restored = installation.rebuild()
    assert (restored.set_back, restored.checkpoints, restored.known) == ([MODEL], [path_of("new")], 0)
    assert (installation.prefix("new"), installation.prefix("old")) == (lost, f"models/{MODEL}/weights/old/7-2")
    lease = installation.lease()
    assert (lease.applied, lease.epoch > lease.epoch_floor > epoch + 1000) == (10, True)
    again = installation.rebuild()
    assert (again.set_back, again.checkpoints, again.known) == ([], [], 1)


def test_a_run_that_was_rebuilt_before_goes_on_beyond_every_epoch_it_ever_had(installation: Installation):
    installation.write("snapshots/6", 6, 1)
    installation.write("weights/w", 9, 2**21)  # after the first rebuild
    installation.rebuild()
    assert installation.lease().epoch_floor > 2**21


def test_a_run_that_was_rebuilt_since_the_backup_goes_on_beyond_every_epoch_it_ever_had(installation: Installation):
    installation.set_back()
    installation.write("weights/v", 11, 4)
    installation.write("weights/w", 12, 2**21)  # after the first rebuild
    installation.rebuild()
    assert installation.lease().epoch_floor > 2**21


def test_of_a_path_that_was_overwritten_since_the_backup_the_later_save_counts(installation: Installation):
    installation.set_back()
    newer = installation.write("weights/old", 20, 5)
    assert installation.rebuild().checkpoints == [path_of("old")]
    assert installation.prefix("old") == newer


def test_a_checkpoint_with_the_name_of_a_later_save_without_a_path_is_restored(installation: Installation):
    named = installation.write("sampler_weights/ephemeral-6", 5, 1)
    installation.write("sampler_weights/ephemeral-6", 6, 1, says={"path": ""})
    path = f"tinker://{MODEL}/sampler_weights/ephemeral-6"
    assert installation.rebuild().checkpoints == [path]
    stored = installation.records.find(Checkpoint, path)
    assert stored is not None and stored.prefix == named


def test_the_later_save_counts_whatever_the_difference_between_a_workers_clock_and_the_state_servers(
    installation: Installation,
):
    """A record has the state server's time, and a manifest the worker's."""
    installation.set_back()
    installation.write("weights/old", 7, 2)
    installation.records.update(Checkpoint.namespace, path_of("old"), {"created": "4e9"})
    newer = installation.write("weights/old", 20, 5)
    assert installation.rebuild().checkpoints == [path_of("old")]
    assert installation.prefix("old") == newer


def test_a_save_made_since_the_state_server_was_set_back_is_not_replaced(installation: Installation):
    installation.set_back()
    installation.write("weights/old", 7, 2, says={"created": "2026-01-02T00:00:00+00:00"})
    installation.write("weights/old", 20, 5)
    restored = installation.rebuild()
    assert (restored.set_back, restored.checkpoints) == ([MODEL], [])
    assert installation.prefix("old") == f"models/{MODEL}/weights/old/7-2"


def test_the_owner_that_went_on_with_the_old_backup_is_fenced_and_may_come_again(installation: Installation):
    """The lost history used the same epoch, and the same names for its writes."""
    installation.set_back()
    before = installation.lease("a/1")
    installation.write("snapshots/20", 20, before.epoch + 1)
    installation.rebuild()
    after = installation.lease("a/1")
    assert after.epoch >= after.epoch_floor > before.epoch + 1


def test_a_save_that_is_under_way_is_left_to_its_op(installation: Installation):
    """Its path must stay free until the commit, or a second attempt of the save would be refused."""
    installation.set_back()
    lease = installation.lease()
    installation.oplog.admit(MODEL, 11, "save_weights", b"save", "digest")
    installation.write("weights/new", 11, lease.epoch)
    restored = installation.rebuild()
    assert (restored.set_back, restored.checkpoints, restored.known) == ([], [], 1)
    assert installation.prefix("new") is None
    installation.oplog.commit(lease, 11, Result(b"{}"))


def test_a_deleted_checkpoint_stays_deleted_and_a_deleted_run_ended(installation: Installation):
    installation.set_back()
    installation.write("weights/gone", 9, 3)
    installation.write("weights/half", 11, 3)
    RedisLifecycle(installation.client, SETTINGS).end_model(MODEL)
    restored = installation.rebuild()
    assert (restored.set_back, restored.checkpoints, restored.known) == ([], [], 1)
