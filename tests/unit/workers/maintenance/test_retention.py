"""A run keeps the newest checkpoints of each kind; published ones and those with a TTL of their own always stay."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from app.domain.accounts import Project
from app.domain.checkpoints import OWNER, PROJECT, CheckpointPrefix
from app.domain.limits import Limits, Payer
from app.domain.ops import LoadWeights, encode
from app.domain.records import Checkpoint, Model
from app.services.tenants.limits import LimitsFinder
from app.settings import EngineSettings, Settings
from app.stores.objects.folder import FolderStore
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords, dump, load
from tests.assembly import parts
from workers.maintenance import retention
from workers.maintenance.orphans import Orphans
from workers.maintenance.retention import Retention
from workers.process.parts import create_maintenance

RUN, OTHER_RUN = "session:train:0", "session:train:1"
HASTY = EngineSettings(orphan_s=0.001)
SIZE = 100


class Installation:
    """Two runs of a project that keeps the newest `keep` checkpoints."""

    def __init__(self, client: redis.Redis, folder: Path, keep: int | None = 2) -> None:
        self.client, self.store = client, FolderStore(folder, "secret", "http://x")
        self.oplog, self.records = RedisOpLog(client, HASTY, self.store), RedisRecords(client)
        self.limits = Limits(keep_checkpoints=keep)
        for run in (RUN, OTHER_RUN):
            head = {"applied": "1000", "epoch": "1"}
            self.oplog.create_model(run, {**dump(Model("me", "session", "base", 0.0)), **head})

    def save(
        self, name: str, seq: int, kind: str = "weights", run: str = RUN, *, epoch: int = 1, **changes: object
    ) -> str:
        """Records a save, as its commit does. Returns its path."""
        path, place = f"tinker://{run}/{kind}/{name}", str(CheckpointPrefix(run, kind, name, epoch, seq))
        self.store.put_new(f"{place}/manifest.json", b"x")
        checkpoint = Checkpoint("me", run, kind, "base", place, 0.0, SIZE, {}, ["a"])
        self.records.put(Checkpoint.namespace, path, dump(replace(checkpoint, **changes)))
        return path

    def change(self, path: str, **changes: object) -> None:
        fields = {name: json.dumps(value) for name, value in changes.items()}
        self.records.update(Checkpoint.namespace, path, fields)

    def round(self, records: RedisRecords | None = None) -> None:
        Retention(records or self.records, LimitsFinder(self.records, self.limits)).sweep()

    def kept(self) -> set[str]:
        return {path.removeprefix("tinker://session:train:") for path, _ in self.records.list(Checkpoint.namespace)}

    def audited(self, project: str = "me") -> list[dict[str, str]]:
        pages = RedisPages(self.client, HASTY).find("audit", [project], range(2**31))
        entries = [json.loads(text.partition(" ")[2]) for fields in pages.values() for text in fields.values()]
        return [{"event": entry["event"], **entry["event_details"]} for entry in entries]


@pytest.fixture
def installation(client: redis.Redis, tmp_path: Path) -> Installation:
    return Installation(client, tmp_path)


def test_a_run_keeps_the_newest_of_each_kind_in_the_order_of_their_saves(installation: Installation):
    for seq in (9, 10, 11):  # as texts they have another order
        installation.save(f"w{seq}", seq)
        installation.save(f"s{seq}", seq, "sampler_weights")
    installation.save("later", 3, epoch=2)
    installation.save("alone", 1, run=OTHER_RUN)
    installation.round()
    assert installation.kept() == {
        *("0/weights/later", "0/weights/w11", "1/weights/alone"),
        *("0/sampler_weights/s10", "0/sampler_weights/s11"),
    }


def test_published_ones_and_those_with_a_ttl_of_their_own_stay_and_do_not_count(installation: Installation):
    far = installation.records.now() + 3600
    installation.save("public", 1, public=True)
    installation.save("own", 2, expires_at=far)
    installation.save("for-ever", 3, expiry_by=OWNER)
    for seq in (4, 5, 6):
        installation.save(f"w{seq}", seq, expires_at=far, expiry_by=PROJECT)
    installation.save("expired", 7, expires_at=1.0, expiry_by=PROJECT)
    installation.save("newer", 8, public=True)
    installation.round()
    stayed = {f"0/weights/{name}" for name in ("public", "own", "for-ever", "w5", "w6", "newer", "expired")}
    assert installation.kept() == stayed


def test_a_checkpoint_of_an_earlier_version_counts_unless_it_has_a_ttl(installation: Installation):
    for seq in (1, 2, 3, 4):
        path = installation.save(f"w{seq}", seq, expires_at=2.0**40 if seq == 1 else None)
        installation.client.hdel(f"tinsmith:checkpoints:{path}", "expiry_by")
    installation.round()
    assert installation.kept() == {f"0/weights/w{seq}" for seq in (1, 3, 4)}


def test_each_project_keeps_its_own_number_and_all_without_one(client: redis.Redis, tmp_path: Path):
    installation = Installation(client, tmp_path, keep=None)
    project = Project("project-1", "org", "kettles", 0.0, limits={"keep_checkpoints": 1})
    installation.records.put(Project.namespace, project.id, dump(project))
    for seq in (1, 2, 3):
        installation.save(f"w{seq}", seq)
        installation.save(f"w{seq}", seq, run=OTHER_RUN, owner=project.id)
    installation.round()
    assert installation.kept() == {"0/weights/w1", "0/weights/w2", "0/weights/w3", "1/weights/w3"}
    assert {entry["tinker_path"] for entry in installation.audited(project.id)} == {
        f"tinker://{OTHER_RUN}/weights/w{seq}" for seq in (1, 2)
    }


def test_each_deletion_is_audited_once_and_frees_its_room(installation: Installation):
    paths = [installation.save(f"w{seq}", seq) for seq in range(4)]
    for _ in range(2):
        installation.round()
    assert sorted(entry["tinker_path"] for entry in installation.audited()) == paths[:2]
    assert (
        installation.audited()[0].items()
        >= {
            "event": "checkpoint_expire",
            "user_id": "operator",
            "project_id": "me",
            "model_id": RUN,
            "keep_checkpoints": 2,
        }.items()
    )
    used = RedisQuotas(installation.client, HASTY).used(Payer("project", "me", Limits()))
    assert used.storage_bytes == 2 * SIZE


def test_more_than_one_script_deletes_are_deleted(installation: Installation, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "_DELETED_AT_ONCE", 2)
    for seq in range(7):
        installation.save(f"w{seq}", seq)
    installation.round()
    assert installation.kept() == {"0/weights/w5", "0/weights/w6"}


def test_what_a_call_loads_can_be_read_until_the_call_has_ended(installation: Installation):
    """A checkpoint that is deleted by its owner loses its files at once; these files stay."""
    path = installation.save("w1", 1)
    prefix = str(CheckpointPrefix(RUN, "weights", "w1", 1, 1))
    payload = encode(LoadWeights(path, False, prefix))
    installation.oplog.admit(OTHER_RUN, 1001, "load_weights", payload, "digest")
    for seq in (2, 3):
        installation.save(f"w{seq}", seq)
    installation.round()
    assert path not in dict(installation.records.list(Checkpoint.namespace))
    engine = parts(installation.client, Settings(engine=HASTY), "node/boot", installation.oplog, installation.store)
    engine.keeper.stop()
    orphans = Orphans(engine.oplog, engine.lifecycle, engine.records, engine.payloads, installation.store, HASTY)
    for _ in range(3):
        orphans.sweep()
        time.sleep(0.01)
    assert installation.store.list(f"{prefix}/")
    engine.lifecycle.end_model(OTHER_RUN)
    for _ in range(3):
        orphans.sweep()
        time.sleep(0.01)
    assert not installation.store.list(f"{prefix}/")


def test_workers_run_the_task(installation: Installation):
    for seq in range(4):
        installation.save(f"w{seq}", seq)
    settings = Settings(limits={"project": {"keep_checkpoints": 1}})
    made = parts(installation.client, settings, "node/boot", installation.oplog, installation.store)
    made.keeper.stop()
    create_maintenance(made)._round("retention")
    assert installation.kept() == {"0/weights/w3"}


class Listed(RedisRecords):
    """Records that note which namespaces are listed. Checkpoints cannot be listed while the state server is `away`."""

    def __init__(self, client: redis.Redis, *, away: bool = False) -> None:
        super().__init__(client)
        self.away = away
        self.listed: list[str] = []

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        self.listed.append(namespace)
        if self.away:
            raise redis.ConnectionError("away")
        return super().list(namespace, prefix)


def test_while_no_project_has_a_number_no_checkpoint_is_read(client: redis.Redis, tmp_path: Path):
    installation = Installation(client, tmp_path, keep=None)
    records = Listed(client)
    project = Project("project-1", "org", "kettles", 0.0, limits={"checkpoint_ttl_s": 3600})
    records.put(Project.namespace, project.id, dump(project))
    installation.round(records)
    assert Checkpoint.namespace not in records.listed
    records.put(Project.namespace, project.id, dump(replace(project, limits={"keep_checkpoints": 2})))
    installation.round(records)
    assert Checkpoint.namespace in records.listed


def test_a_round_that_fails_is_repeated_no_sooner_than_another(installation: Installation):
    records = Listed(installation.client, away=True)
    task = Retention(records, LimitsFinder(installation.records, installation.limits))
    with pytest.raises(redis.ConnectionError):
        task.sweep()
    task.sweep()
    assert len(records.listed) == 1


def test_what_cannot_be_read_stays_and_is_logged_once_a_round(
    installation: Installation, caplog: pytest.LogCaptureFixture
):
    """A record may be damaged, and a project may have limits of a later version."""
    later = Project("project-1", "org", "kettles", 0.0, limits={"keep_checkpoints": 1, "of_a_later_version": 1})
    installation.records.put(Project.namespace, later.id, dump(later))
    for seq in (1, 2, 3):
        installation.save(f"w{seq}", seq)
        installation.save(f"w{seq}", seq, run=OTHER_RUN, owner=later.id)
        installation.save(f"s{seq}", seq, "sampler_weights", run=OTHER_RUN, owner=later.id)
    damaged = installation.save("damaged", 4)
    for field, text in (("created", '"hush'), ("prefix", "3")):
        fields = {**dump(Checkpoint("me", RUN, "weights", "base", "", 0.0, SIZE, {}, [])), field: text}
        installation.records.put(Checkpoint.namespace, f"{damaged}-{field}", fields)
    installation.round()
    assert "0/weights/w1" not in installation.kept(), "the other projects' rounds go on"
    assert {f"1/{kind}{seq}" for kind in ("weights/w", "sampler_weights/s") for seq in (1, 2, 3)} <= installation.kept()
    assert {"0/weights/damaged-created", "0/weights/damaged-prefix"} <= installation.kept()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "3 checkpoints or projects" in warning.getMessage() and "hush" not in warning.getMessage()


class Killed(Exception):
    """The worker died."""


class Interrupted(RedisRecords):
    """Records that others change just before each deletion, whose worker may die before or after it. It asserts that a
    deletion took nothing that must stay at that moment."""

    def __init__(self, installation: Installation, chance: random.Random, keep: int) -> None:
        super().__init__(installation.client)
        self._installation, self._chance, self._keep = installation, chance, keep
        self.deletions = 0

    def delete_older(self, *asked: object) -> bool:
        if self._chance.random() < 0.5:
            change(self._installation, self._chance)
        before = _read(self)
        if self._chance.random() < 0.2:
            raise Killed
        done = super().delete_older(*asked)
        left = _read(self)
        assert protected(before, self._keep) <= left.keys()
        assert done == (before != left)
        self.deletions += done
        if self._chance.random() < 0.2:
            raise Killed
        return done


def _read(records: RedisRecords) -> dict[str, Checkpoint]:
    return {path: load(Checkpoint, fields) for path, fields in records.list(Checkpoint.namespace)}


def protected(found: Mapping[str, Checkpoint], keep: int) -> set[str]:
    """The checkpoints that must stay, computed here independently of the code under test."""
    stays: set[str] = set()
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for path, one in found.items():
        own = one.expiry_by == OWNER or (one.expires_at is not None and one.expiry_by == "")
        if one.public or own:
            stays.add(path)
        else:
            groups.setdefault((one.model_id, one.kind), []).append((int(one.prefix.split("/")[-1].split("-")[0]), path))
    for group in groups.values():
        stays |= {path for _, path in sorted(group)[-keep:]}
    return stays


SEQS = iter(range(1, 10**9))


def change(installation: Installation, chance: random.Random) -> None:
    """A save, perhaps over an older one, or a change by the owner."""
    paths = [path for path, _ in installation.records.list(Checkpoint.namespace)]
    far = installation.records.now() + 3600
    what = chance.choice(["save", "save", "save", "publish", "unpublish", "ttl", "for ever", "delete"])
    if what == "save" or not paths:
        run, kind = chance.choice([RUN, OTHER_RUN]), chance.choice(["weights", "sampler_weights"])
        expiry = chance.choice([{}, {}, {"expires_at": far, "expiry_by": PROJECT}, {"expires_at": far}])
        installation.save(f"w{chance.randrange(12)}", next(SEQS), kind, run, **expiry)
    elif what in ("publish", "unpublish"):
        installation.change(chance.choice(paths), public=what == "publish")
    elif what == "delete":
        installation.records.delete(Checkpoint.namespace, chance.choice(paths))
    else:
        installation.change(chance.choice(paths), expires_at=far if what == "ttl" else None, expiry_by=OWNER)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_must_stay_is_ever_deleted(client: redis.Redis, tmp_path: Path, seed: int):
    """Random saves, changes and kills, also between the reads of a round and its deletions."""
    chance = random.Random(seed)
    keep = chance.randint(1, 3)
    installation = Installation(client, tmp_path, keep)
    records = Interrupted(installation, chance, keep)
    for _ in range(60):
        for _ in range(chance.randrange(6)):
            change(installation, chance)
        with contextlib.suppress(Killed):
            installation.round(records)
    assert records.deletions > 3
    installation.round()
    found = _read(installation.records)
    assert protected(found, keep) == found.keys(), "and all others are gone in the end"
