"""Files without a reference are removed; referenced files, pinned files and files being written never are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from app.domain import ops
from app.domain.limits import PROJECT, Limits, Payer
from app.domain.ops import CreateModel, LoadWeights, LoraSpec, ModelSpec, Op
from app.domain.records import UPLOADS, Checkpoint, Model, Sampler, Session, Upload, uploaded
from app.domain.results import Result
from app.errors import Unavailable
from app.services.imports.importer import Importer
from app.services.tenants.limits import LimitsFinder, QuotaService
from app.services.tenants.spending import Spending
from app.settings import EngineSettings, Settings, StoreSettings
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore
from app.stores.objects.routes import DAY_S
from app.stores.objects.s3 import S3Store
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease
from tests.servers_s3 import start_s3
from workers.maintenance.orphans import Orphans

MODEL = "session:train:0"
PATIENT = EngineSettings()
HASTY = EngineSettings(orphan_s=0.001)
OK = Result(b"{}")


@dataclass
class Installation:
    """A model that has applied seq 10 in epoch 3, and whose snapshot is at seq 8."""

    client: redis.Redis
    oplog: RedisOpLog
    records: RedisRecords
    store: ObjectStore
    lease: Lease

    @property
    def payloads(self) -> RedisPayloads:
        return RedisPayloads(self.client, HASTY, self.store)

    def write(self, rest: str, *names: str, model: str = MODEL) -> str:
        prefix = f"models/{model}/{rest}"
        for name in names or ("adapter_model.safetensors", "manifest.json"):
            self.store.put_new(f"{prefix}/{name}", b"x")
        return prefix

    def checkpoint(self, name: str, prefix: str, **changes: object) -> str:
        path = f"tinker://{MODEL}/weights/{name}"
        fields = dump(Checkpoint("me", MODEL, "weights", "base", prefix, 0.0, 1, {}, ["a"]))
        self.records.put(Checkpoint.namespace, path, {**fields, **{k: json.dumps(v) for k, v in changes.items()}})
        return path

    def collect(self, rounds: int = 2) -> set[str]:
        """Marks and sweeps, a moment apart. Returns the remaining prefixes."""
        made = Orphans(self.oplog, RedisLifecycle(self.client, HASTY), self.records, self.payloads, self.store, HASTY)
        for _ in range(rounds):
            time.sleep(0.01)
            made.sweep()
        return {key.rpartition("/")[0] for key in self.store.list("models/")}

    def journal(self, seq: int, op: Op) -> None:
        payload = ops.encode(op)
        self.oplog.admit(MODEL, seq, op.kind, payload, ops.digest(payload))


def make(client: redis.Redis, store: ObjectStore) -> Installation:
    oplog = RedisOpLog(client, PATIENT)
    head = {"applied": "10", "epoch": "2", "snapshot": f"models/{MODEL}/snapshots/8/8-2", "snapshot_seq": "8"}
    oplog.create_model(MODEL, {**dump(Model("me", "session", "base", 0.0)), **head})
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease) and lease.epoch == 3
    installation = Installation(client, oplog, RedisRecords(client), store, lease)
    installation.write("snapshots/8/8-2")
    return installation


@pytest.fixture
def installation(client: redis.Redis, tmp_path: Path) -> Installation:
    return make(client, FolderStore(tmp_path, "secret", "http://x"))


SNAPSHOT = f"models/{MODEL}/snapshots/8/8-2"


def test_what_was_overwritten_goes_and_what_replaced_it_stays(installation: Installation):
    installation.write("weights/a/4-1")
    newer = installation.write("weights/a/9-2")
    installation.checkpoint("a", newer)
    assert installation.collect() == {SNAPSHOT, newer}


def test_a_file_of_the_disk_among_the_files_of_an_orphan_does_not_keep_them(installation: Installation, tmp_path: Path):
    orphan = installation.write("weights/a/4-1")
    (tmp_path / orphan / ".DS_Store").touch()
    (tmp_path / orphan / "a copy").touch()
    assert installation.collect() == {SNAPSHOT}


def test_an_orphan_that_cannot_be_removed_keeps_no_other(installation: Installation, tmp_path: Path):
    class Stubborn(FolderStore):
        rounds = 0

        def list(self, prefix: str) -> list[str]:
            self.rounds += prefix == "models/"
            return super().list(prefix)

        def delete(self, keys: Iterable[str]) -> None:
            listed = list(keys)
            if any("weights/stuck" in key for key in listed):
                raise Unavailable("the folder belongs to another user")
            super().delete(listed)

    installation.store = store = Stubborn(tmp_path, "secret", "http://x")
    stuck = [installation.write(f"weights/stuck{number}/4-1") for number in range(3)]
    for number in range(3):
        installation.write(f"weights/a{number}/4-1")
    assert installation.collect() == {SNAPSHOT, *stuck}
    patient = EngineSettings(orphan_s=3600)
    lifecycle = RedisLifecycle(installation.client, HASTY)
    made = Orphans(installation.oplog, lifecycle, installation.records, installation.payloads, store, patient)
    before = store.rounds
    for _ in range(3):
        made.sweep()
    assert store.rounds == before + 1, "the store is listed once a period"


def test_files_that_a_call_uses_again_since_the_records_were_read_stay(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
):
    used, looked = installation.write("weights/a/4-1"), RedisLifecycle.overdue

    def used_meanwhile(self: RedisLifecycle, unreferenced: Iterable[str]) -> list[str]:
        found = looked(self, unreferenced)
        if used in found:
            self.use_files(used)
        return found

    monkeypatch.setattr(RedisLifecycle, "overdue", used_meanwhile)
    assert installation.collect() == {SNAPSHOT, used}


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "not removed"])
def test_files_are_used_again_after_their_removal_and_not_during_it(
    installation: Installation, tmp_path: Path, removed: bool
):
    lifecycle = RedisLifecycle(installation.client, HASTY)

    class Watched(FolderStore):
        def delete(self, keys: Iterable[str]) -> None:
            if listed := list(keys):
                with pytest.raises(Unavailable, match="are being removed; try again soon"):
                    lifecycle.use_files(prefix)
                if not removed:
                    raise Unavailable("the store is away")
                super().delete(listed)

    installation.store = Watched(tmp_path, "secret", "http://x")
    prefix = installation.write("weights/a/4-1")
    assert installation.collect() == {SNAPSHOT, *([] if removed else [prefix])}
    lifecycle.use_files(prefix)


def test_a_removal_that_a_crash_broke_off_is_ended_by_the_next_round(installation: Installation, tmp_path: Path):
    class Killed(BaseException):
        pass

    class Dying(FolderStore):
        def delete(self, keys: Iterable[str]) -> None:
            if list(keys):
                raise Killed

    installation.store = Dying(tmp_path, "secret", "http://x")
    prefix = installation.write("weights/a/4-1")
    with pytest.raises(Killed):
        installation.collect()
    installation.store = FolderStore(tmp_path, "secret", "http://x")
    assert installation.collect() == {SNAPSHOT}
    RedisLifecycle(installation.client, HASTY).use_files(prefix)


def test_half_written_files_of_an_owner_that_was_replaced_go(installation: Installation):
    installation.write("weights/a/11-2", "adapter_model.safetensors")
    installation.write("snapshots/10/10-2", "optimizer.safetensors")
    assert installation.collect() == {SNAPSHOT}


def test_snapshots_a_crash_left_behind_go_and_the_newest_stays(installation: Installation):
    installation.write("snapshots/4/4-1")
    installation.write("snapshots/6/6-3")
    assert installation.collect() == {SNAPSHOT}


def test_an_expired_checkpoint_goes_with_its_record_by_the_state_servers_clock(installation: Installation, monkeypatch):
    gone, kept = installation.write("weights/a/4-1"), installation.write("weights/b/5-1")
    installation.checkpoint("a", gone, expires_at=installation.records.now() - 1)
    path = installation.checkpoint("b", kept, expires_at=installation.records.now() + 3600)
    clock = time.time()
    monkeypatch.setattr(time, "time", lambda: clock + 7200)
    assert installation.collect() == {SNAPSHOT, kept}
    assert [found for found, _ in installation.records.list(Checkpoint.namespace)] == [path]


class Prolonged(RedisRecords):
    """Records of checkpoints whose owner removes the expiry as soon as somebody has read them."""

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        for key, fields in super().list(namespace, prefix):
            if namespace == Checkpoint.namespace:
                self.update(namespace, key, {"expires_at": "null"})
            yield key, fields


def test_a_checkpoint_that_is_kept_longer_just_as_it_expires_stays(installation: Installation):
    kept = installation.write("weights/a/4-1")
    installation.checkpoint("a", kept, expires_at=installation.records.now() - 1)
    installation.records = Prolonged(installation.client)
    assert installation.collect() == {SNAPSHOT, kept}


def test_an_adapter_goes_with_its_sampler_and_not_before(installation: Installation):
    prefix = installation.write("sampler_weights/ephemeral-5/5-2")
    installation.records.put(
        Sampler.namespace, "session:sample:0", dump(Sampler("me", "session", "base", 0.0, prefix=prefix))
    )
    assert installation.collect() == {SNAPSHOT, prefix}
    installation.records.delete(Sampler.namespace, "session:sample:0")
    assert installation.collect() == {SNAPSHOT}


def test_a_checkpoint_a_sampler_serves_stays_though_it_was_overwritten(installation: Installation):
    old, new = installation.write("weights/a/4-1"), installation.write("weights/a/9-2")
    installation.checkpoint("a", new)
    sampler = Sampler("me", "session", "base", 0.0, f"tinker://{MODEL}/weights/a", old)
    installation.records.put(Sampler.namespace, "session:sample:0", dump(sampler))
    assert installation.collect() == {SNAPSHOT, old, new}


@pytest.mark.parametrize("kind", ["create", "load"])
def test_what_a_journalled_op_loads_stays_as_long_as_it_may_run_or_be_replayed(installation: Installation, kind: str):
    prefix = installation.write("weights/a/4-1")
    create = CreateModel(ModelSpec("base", LoraSpec(4)), "tinker://a", prefix=prefix)
    installation.journal(11, create if kind == "create" else LoadWeights("tinker://a", False, prefix))
    assert installation.collect() == {SNAPSHOT, prefix}
    installation.oplog.commit(installation.lease, 11, OK)
    assert installation.collect() == {SNAPSHOT, prefix}, "a replay would need it"
    newest = installation.write("snapshots/11/11-3")
    installation.oplog.set_snapshot(installation.lease, 11, newest)
    assert installation.collect() == {newest}


def test_what_the_owner_may_be_writing_now_stays_until_it_is_behind(installation: Installation):
    save, snapshot = (
        installation.write("weights/a/11-3"),
        installation.write("snapshots/10/10-3", "optimizer.safetensors"),
    )
    assert installation.collect(3) == {SNAPSHOT, save, snapshot}
    installation.journal(11, LoadWeights("tinker://none", False))
    installation.oplog.commit(installation.lease, 11, OK)
    assert installation.collect() == {SNAPSHOT, snapshot}, "seq 11 was committed without it"
    newest = installation.write("snapshots/11/11-3")
    installation.oplog.set_snapshot(installation.lease, 11, newest)
    assert installation.collect() == {newest}


@pytest.mark.parametrize("generation", ["4-4", "20-5"])
def test_what_a_later_epoch_saved_stays_as_the_state_server_was_set_back(installation: Installation, generation: str):
    saved = installation.write(f"weights/b/{generation}")
    assert installation.collect(3) == {SNAPSHOT, saved}


def test_nothing_goes_before_its_time(installation: Installation):
    prefix = installation.write("weights/a/4-1")
    assert installation.collect(rounds=1) == {SNAPSHOT, prefix}
    patient = RedisLifecycle(installation.client, PATIENT)
    for _ in range(3):
        Orphans(
            installation.oplog, patient, installation.records, installation.payloads, installation.store, PATIENT
        ).sweep()
    assert installation.store.list(f"{prefix}/")


def test_what_is_referred_to_again_is_no_orphan(installation: Installation):
    prefix = installation.write("weights/a/4-1")
    installation.collect(rounds=1)
    installation.checkpoint("a", prefix)
    assert installation.collect() == {SNAPSHOT, prefix}


def test_files_of_a_model_the_state_server_does_not_know_are_left_alone(installation: Installation):
    """The state server may have been emptied, and a rebuild needs these files."""
    unknown = installation.write("weights/a/4-1", model="session:train:9")
    assert installation.collect(3) == {SNAPSHOT, unknown}
    installation.client.flushall()
    assert installation.collect(3) == {SNAPSHOT, unknown}


def test_all_an_ended_model_left_goes_but_its_checkpoints(installation: Installation):
    kept = installation.write("weights/a/4-1")
    installation.checkpoint("a", kept)
    installation.write("snapshots/10/10-3")
    installation.write("weights/b/11-3", "adapter_model.safetensors")
    RedisLifecycle(installation.client, PATIENT).end_model(MODEL)
    assert installation.collect() == {kept}


def test_an_ended_run_is_forgotten_once_its_session_its_checkpoints_and_their_files_are_gone(
    installation: Installation,
):
    """A checkpoint that expired just before its run was torn down had files for ever: nobody knew their run."""
    records, kept = installation.records, installation.write("weights/a/4-1")
    path = installation.checkpoint("a", kept)
    records.put_new(Session.namespace, "session", dump(Session("me", 0.0)))
    RedisLifecycle(installation.client, PATIENT).end_model(MODEL)
    left = []
    for reference in ("session", "checkpoint", None):
        left.append((installation.collect(), records.get(Model.namespace, MODEL) is not None))
        if reference == "session":
            records.delete(Session.namespace, "session")
        elif reference == "checkpoint":
            records.delete(Checkpoint.namespace, path)
    assert left == [({kept}, True), ({kept}, True), (set(), True)]
    installation.collect()
    assert records.get(Model.namespace, MODEL) is None


def test_a_run_that_has_not_ended_or_whose_session_lives_is_kept_without_files(installation: Installation):
    installation.store.delete(installation.store.list("models/"))
    installation.collect()
    assert installation.records.get(Model.namespace, MODEL)
    installation.records.put_new(Session.namespace, "session", dump(Session("me", 0.0)))
    RedisLifecycle(installation.client, PATIENT).end_model(MODEL)
    installation.collect()
    assert installation.records.get(Model.namespace, MODEL)


def test_what_lies_elsewhere_is_not_ours_to_judge(installation: Installation):
    for key in (f"others/{MODEL}:1/abc", f"models/{MODEL}/notes.txt", f"models/{MODEL}/weights/a/other/file"):
        installation.store.put_new(key, b"x")
    installation.collect(3)
    assert len(installation.store.list("")) == 3 + 2


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    with start_s3(tmp_path_factory.mktemp("s3")) as settings:
        yield settings


def test_on_s3_too_orphans_go_and_what_is_referred_to_stays(client: redis.Redis, s3: StoreSettings):
    installation = make(client, S3Store(s3))
    installation.write("weights/a/4-1")
    newer, written = (
        installation.write("weights/a/9-2"),
        installation.write("weights/c/11-3", "adapter_model.safetensors"),
    )
    installation.checkpoint("a", newer)
    installation.write("weights/b/9-2", "adapter_model.safetensors")
    assert installation.collect() == {SNAPSHOT, newer, written}


def test_an_upload_goes_with_its_files_when_it_expires_and_not_before(installation: Installation):
    now = installation.records.now()
    for name, expires_at, finished in (
        ("open", now + 60, False),
        ("expired", now - 1, False),
        ("done", now + 60, True),
    ):
        upload = Upload("me", "base", {}, now, 1, expires_at, finished)
        installation.records.put_new(Upload.namespace, name, dump(upload))
        installation.store.put_new(uploaded(name, "adapter_config.json"), b"x")
    installation.store.put_new(uploaded("never-started", "adapter_config.json"), b"x")
    installation.collect(rounds=1)
    assert installation.store.list(f"{UPLOADS}/") == [uploaded("open", "adapter_config.json")]
    assert {upload_id for upload_id, _ in installation.records.list(Upload.namespace)} == {"open", "done"}


def test_files_of_an_upload_that_starts_just_before_files_are_listed_stay(installation: Installation):
    class Starting(FolderStore):
        def list(self, prefix: str) -> list[str]:
            if prefix == f"{UPLOADS}/":
                upload = Upload("me", "base", {}, 0.0, 1, installation.records.now() + 60)
                installation.records.put_new(Upload.namespace, "new", dump(upload))
                self.put_new(uploaded("new", "adapter_config.json"), b"x")
            return super().list(prefix)

    assert isinstance(installation.store, FolderStore)
    installation.store = Starting(installation.store._root, "secret", "http://x")
    installation.collect(rounds=1)
    assert installation.store.read(uploaded("new", "adapter_config.json")) == b"x"


def test_routes_count_no_more_once_their_files_are_removed(installation: Installation):
    day = int(installation.records.now()) // DAY_S
    for past in (1, 2):
        installation.client.sadd("tinsmith:route_days", day - past)
        installation.client.hset(f"tinsmith:route_bytes:{day - past}", "project:me", 10)
        installation.store.put_new(f"routes/{day - past}/session:sample:0:1-0@a", b"x")
    payer, quotas = Payer(PROJECT, "me", Limits()), RedisQuotas(installation.client, PATIENT)
    assert quotas.used(payer).storage_bytes == 20
    installation.collect(rounds=1)
    assert quotas.used(payer).storage_bytes == 10
    assert installation.store.list("routes/") == [f"routes/{day - 1}/session:sample:0:1-0@a"]
    assert installation.client.keys("tinsmith:route_bytes:*") == [f"tinsmith:route_bytes:{day - 1}".encode()]


def test_a_round_that_fails_is_not_repeated_at_once(installation: Installation, monkeypatch: pytest.MonkeyPatch):
    listed: list[str] = []

    def fail(prefix: str) -> list[str]:
        listed.append(prefix)
        raise Unavailable("the object store is away")

    monkeypatch.setattr(installation.store, "list", fail)
    lifecycle = RedisLifecycle(installation.client, PATIENT)
    orphans = Orphans(
        installation.oplog, lifecycle, installation.records, installation.payloads, installation.store, PATIENT
    )
    with pytest.raises(Unavailable):
        orphans.sweep()
    orphans.sweep()
    assert len(listed) == 1


@pytest.fixture
def imported(installation: Installation, tmp_path: Path) -> Callable[[], str]:
    """Imports a checkpoint, or completes an import that broke off. Returns its path."""
    client, records, store = installation.client, installation.records, installation.store
    lifecycle, quotas = RedisLifecycle(client, PATIENT), RedisQuotas(client, PATIENT)
    spending = Spending(RedisPages(client, PATIENT), Settings().prices_of)
    importer = Importer(
        records, installation.oplog, lifecycle, store, QuotaService(LimitsFinder(records, Limits()), quotas, spending)
    )
    file = tmp_path / "adapter_config.json"
    file.write_bytes(b"{}")
    return lambda: importer.add(None, "me", "imported", "base", LoraSpec(4), {file.name: file})


def test_an_import_that_broke_off_is_not_completed_while_its_files_are_being_removed(
    installation: Installation, imported: Callable[[], str]
):
    path = imported()
    prefix = json.loads(installation.records.get(Checkpoint.namespace, path)["prefix"])
    installation.records.delete(Checkpoint.namespace, path)
    installation.client.zadd(keys.ORPHANS, {prefix: 1})
    with RedisLifecycle(installation.client, HASTY).removing(prefix), pytest.raises(Unavailable):
        imported()
    assert imported() == path


def test_files_of_an_import_that_broke_off_go(installation: Installation, imported: Callable[[], str]):
    path = imported()
    kept = installation.collect()
    installation.records.delete(Checkpoint.namespace, path)
    assert kept - installation.collect() == {prefix for prefix in kept if "models/imported:train:0" in prefix} != set()


def spilled(installation: Installation, seq: int) -> str:
    """Moves the payload of a new call to the object store. Returns the key of its object."""
    installation.journal(seq, LoadWeights("tinker://x/weights/a", optimizer=True, prefix="p"))
    assert installation.payloads.spill(f"{MODEL}:{seq}")
    return installation.store.list(f"payloads/{MODEL}:{seq}/")[0]


def test_a_payload_that_a_call_or_a_move_needs_stays(installation: Installation):
    kept = spilled(installation, 11)
    begun = f"payloads/{MODEL}:12/begun"
    installation.payloads._run("begin_spill", begun)
    installation.store.put_new(begun, b"x")
    installation.collect(rounds=3)
    assert installation.store.list("payloads/") == [kept, begun]


def test_the_payloads_of_a_lost_state_server_are_removed(installation: Installation):
    spilled(installation, 11)
    installation.client.flushall()
    installation.collect(rounds=1)
    assert len(installation.store.list("payloads/")) == 1, "it is only marked"
    installation.collect()
    assert installation.store.list("payloads/") == []


def test_the_large_results_of_a_lost_state_server_are_removed_and_no_others(installation: Installation):
    installation.journal(11, LoadWeights("tinker://x/weights/a", optimizer=True, prefix="p"))
    large = Result(b"x" * HASTY.result_spill_bytes)
    installation.oplog.commit(installation.lease, 11, large)
    assert installation.payloads.spill_result(f"{MODEL}:11")
    installation.collect(rounds=3)
    assert len(installation.store.list("results/")) == 1
    installation.client.flushall()
    installation.collect(rounds=3)
    assert installation.store.list("results/") == []
