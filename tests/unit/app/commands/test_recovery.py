"""`tinsmith rebuild`, from its options to its output."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import tomli_w

from app import cli
from app.domain.accounts import Project
from app.domain.checkpoints import MANIFEST, FileEntry, Manifest
from app.domain.limits import Limits
from app.domain.ops import LoraSpec
from app.domain.records import Checkpoint, Model
from app.domain.results import HOUR_S
from app.services.recovery.rebuild import Rebuild, Restored
from app.services.tenants.limits import LimitsFinder
from app.settings import EngineSettings, RedisSettings, Settings, StoreSettings
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore
from app.stores.objects.s3 import S3Store
from app.stores.pages import LedgerPage, PageFiles
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords
from tests.pages import in_mid_hour
from tests.servers_s3 import start_s3
from workers.maintenance.retention import Retention

MODEL = "session:train:0"
PATH, NEWER = (f"tinker://{MODEL}/weights/{name}" for name in "ab")


def store_run(store: ObjectStore) -> None:
    """Stores a snapshot at seq 6 and checkpoints saved at seq 7 and 8."""
    for rest, path, seq in (("snapshots/6", "", 6), ("weights/a", PATH, 7), ("weights/b", NEWER, 8)):
        prefix = f"models/{MODEL}/{rest}/{seq}-1"
        manifest = Manifest(
            path, f"{seq}-1", MODEL, "me", "base", LoraSpec(4), seq, 1, "2026-01-01T00:00:00.000+00:00",
            {"adapter": FileEntry(1, "0")}, 2, "cpu",
        )  # fmt: skip
        store.put_new(f"{prefix}/adapter", b"x")
        store.put_new(f"{prefix}/{MANIFEST}", manifest.to_json())


def is_restored(client: redis.Redis) -> bool:
    records = RedisRecords(client)
    return bool(records.get(Checkpoint.namespace, PATH) and records.get(Model.namespace, MODEL))


def test_it_says_what_it_restored_and_what_it_cannot(client: redis.Redis, valkey: str, tmp_path: Path, capsys):
    store_run(FolderStore(tmp_path / "objects", "", ""))
    arguments = ["rebuild", "--data-dir", str(tmp_path), "--redis", valkey]
    assert cli.main(arguments) == 0
    assert is_restored(client)
    said = capsys.readouterr().out
    places = f"from the object store {tmp_path / 'objects'} into the state server {valkey}\n"
    assert said.startswith(f"{places}restored 1 runs and 2 checkpoints\n")
    assert f"run {MODEL} continues after seq 6\n" in said
    assert f"checkpoint {PATH}\n" in said
    for lost in ("calls after a run's newest snapshot", "results", "sampling sessions", "metadata of sessions"):
        assert lost in said.replace("names, tags and ", "")
    assert cli.main(arguments) == 0
    assert "/snapshots" not in said
    said = capsys.readouterr().out
    assert "restored 0 runs and 0 checkpoints\n1 runs were not missing" in said
    assert "not restored" not in said, "nothing was lost"


def test_workers_that_run_meanwhile_keep_what_the_limits_of_a_project_keep(
    client: redis.Redis, valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    objects, records = FolderStore(tmp_path / "objects", "", ""), RedisRecords(client)
    store_run(objects)
    AccountFiles(objects).add(Project("me", "org", "mine", 0.0, limits={"keep_checkpoints": None}))
    rebuild = Rebuild.__call__

    def and_retain(self: Rebuild) -> Restored:
        restored = rebuild(self)
        Retention(records, LimitsFinder(records, Limits(keep_checkpoints=1))).sweep()
        return restored

    monkeypatch.setattr(Rebuild, "__call__", and_retain)
    assert cli.main(["rebuild", "--data-dir", str(tmp_path), "--redis", valkey]) == 0
    assert is_restored(client)


def test_what_a_project_spent_this_month_is_refilled_from_its_kept_usage(
    client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    in_mid_hour()
    hour = int(RedisRecords(client).now() // HOUR_S)
    PageFiles(FolderStore(tmp_path / "objects", "", "")).add(LedgerPage("usage", "me", hour), {"training s base": "30"})
    assert cli.main(["rebuild", "--data-dir", str(tmp_path), "--redis", valkey]) == 0
    assert RedisPages(client, EngineSettings()).this_month("me") == {("training", "base"): 30}
    assert "refilled this month's spending of 1 projects" in capsys.readouterr().out


def test_a_backup_that_is_restored_brings_back_what_a_project_spent_this_month(
    client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    in_mid_hour()
    hour, old, new = int(RedisRecords(client).now() // HOUR_S), tmp_path / "old", tmp_path / "new"
    PageFiles(FolderStore(old / "objects", "", "")).add(LedgerPage("usage", "me", hour), {"training s base": "30"})
    assert cli.main(["backup", str(tmp_path / "file"), "--data-dir", str(old), "--redis", valkey]) == 0
    new.mkdir()
    assert cli.main(["restore", str(tmp_path / "file"), "--data-dir", str(new), "--redis", valkey]) == 0
    assert RedisPages(client, EngineSettings()).this_month("me") == {("training", "base"): 30}
    assert "refilled this month's spending of 1 projects" in capsys.readouterr().out


@pytest.mark.parametrize("there", [False, True])
def test_a_backup_of_a_store_without_accounts_is_refused(
    there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if there:
        (tmp_path / "objects").mkdir()
    file = tmp_path / "file"
    assert cli.main(["backup", str(file), "--data-dir", str(tmp_path), "--redis", "redis://127.0.0.1:1/0"]) == 2
    said = capsys.readouterr().err
    assert f"are in {tmp_path / 'objects'}" in said and "are --data-dir and --s3 right?" in said
    assert not file.exists()
    assert (tmp_path / "objects").exists() == there


def test_without_a_server_given_it_is_the_stack_that_runs_on_the_folder(
    client: redis.Redis, valkey: str, tmp_path: Path
):
    running = Settings(
        data_dir=tmp_path,
        redis=RedisSettings(url=valkey),
        store=StoreSettings(url=(tmp_path / "elsewhere").as_uri()),
    )
    store_run(FolderStore(tmp_path / "elsewhere", "", ""))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.toml").write_text(tomli_w.dumps(running.model_dump(mode="json", exclude_none=True)))
    assert cli.main(["rebuild", "--data-dir", str(tmp_path)]) == 0
    assert is_restored(client)


def test_a_backup_of_a_moved_folder_reads_its_objects_where_they_are(tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    page = LedgerPage("usage", "me", 5)
    PageFiles(FolderStore(first / "objects", "", "")).add(page, {"training s base": "30"})
    (first / "run").mkdir()
    running = Settings(data_dir=first, redis=RedisSettings(url="redis://127.0.0.1:1/0"))
    (first / "run" / "settings.toml").write_text(tomli_w.dumps(running.model_dump(mode="json", exclude_none=True)))
    first.rename(moved)
    assert cli.main(["backup", str(tmp_path / "file"), "--data-dir", str(moved)]) == 0
    assert not first.exists()


def test_as_in_a_container_it_reads_the_settings_its_environment_names(
    client: redis.Redis, valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store_run(FolderStore(tmp_path / "elsewhere", "", ""))
    written = Settings(store=StoreSettings(url=(tmp_path / "elsewhere").as_uri()))
    (tmp_path / "tinsmith.toml").write_text(tomli_w.dumps(written.model_dump(mode="json", exclude_none=True)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINSMITH_SETTINGS", str(tmp_path / "tinsmith.toml"))
    monkeypatch.setenv("TINSMITH_REDIS_URL", valkey)
    assert cli.main(["rebuild"]) == 0
    assert is_restored(client)


def test_a_password_is_not_shown(client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    server = valkey.removeprefix("redis://")
    assert cli.main(["rebuild", "--data-dir", str(tmp_path), "--redis", f"redis://default:hunter2@{server}"]) == 0
    said = capsys.readouterr().out
    assert f"into the state server redis://{server}\n" in said
    assert "hunter2" not in said


def test_a_run_that_was_set_back_is_named(
    client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store_run(FolderStore(tmp_path / "objects", "", ""))
    arguments = ["rebuild", "--data-dir", str(tmp_path), "--redis", valkey]
    assert cli.main(arguments) == 0
    records = RedisRecords(client)
    records.update(Model.namespace, MODEL, {"epoch": "1", "applied": "5"})
    records.delete(Checkpoint.namespace, PATH)
    assert cli.main(arguments) == 0
    assert is_restored(client)
    assert f"run {MODEL} was set back: " in capsys.readouterr().out


def test_a_state_server_that_takes_no_writes_is_one_line_and_exit_code_2(
    client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store_run(FolderStore(tmp_path / "objects", "", ""))
    client.config_set("min-replicas-to-write", 1)
    try:
        assert cli.main(["rebuild", "--data-dir", str(tmp_path), "--redis", valkey]) == 2
    finally:
        client.config_set("min-replicas-to-write", 0)
    said = capsys.readouterr().err
    assert "NOREPLICAS" in said
    assert len(said.splitlines()) == 1


def test_the_manifests_may_lie_on_s3(client: redis.Redis, valkey: str, tmp_path: Path, monkeypatch):
    with start_s3(tmp_path / "s3") as s3:
        store_run(S3Store(s3))
        monkeypatch.setenv("TINSMITH_S3_ACCESS_KEY", s3.access_key)
        monkeypatch.setenv("TINSMITH_S3_SECRET_KEY", s3.secret_key)
        arguments = ["rebuild", "--data-dir", str(tmp_path / "data"), "--redis", valkey, "--s3", s3.url]
        assert cli.main(arguments) == 0
    assert is_restored(client)


def test_a_folder_with_a_damaged_manifest_is_named_and_the_rest_restored(
    client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store = FolderStore(tmp_path / "objects", "", "")
    store_run(store)
    store.put_new(f"models/{MODEL}/weights/c/9-1/{MANIFEST}", b"not json")
    assert cli.main(["rebuild", "--data-dir", str(tmp_path), "--redis", valkey]) == 0
    assert is_restored(client)
    assert f"damaged, not restored: models/{MODEL}/weights/c/9-1\n" in capsys.readouterr().out
