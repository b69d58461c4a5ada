"""A process does not start when the object store is not the one of the state server."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from app.domain.checkpoints import MODELS
from app.domain.records import Checkpoint
from app.errors import SetupError, Unavailable
from app.settings import RedisSettings, Settings
from app.stores.objects.folder import FolderStore
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords
from app.stores.store_id import STORE_ID, check_store_id


@pytest.fixture
def records(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client)


@pytest.fixture
def settings(valkey: str, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey))


def folder(root: Path) -> FolderStore:
    return FolderStore(root, "", "")


def test_both_keep_the_id_of_the_first_start(
    client: redis.Redis, records: RedisRecords, settings: Settings, tmp_path: Path
) -> None:
    store = folder(tmp_path / "objects")
    check_store_id(settings, records, store)
    [key], first = store.list(""), store.read(STORE_ID)
    assert key == "store-id" and len(first) == 32
    assert client.hgetall("tinsmith:object_store:id") == {b"id": b'"' + first + b'"'}
    check_store_id(settings, records, folder(tmp_path / "objects"))
    assert store.read(STORE_ID) == first


def test_processes_that_start_at_once_agree(records: RedisRecords, settings: Settings, tmp_path: Path) -> None:
    stores = [folder(tmp_path / "objects") for _ in range(16)]
    with ThreadPoolExecutor(len(stores)) as threads:
        assert list(threads.map(lambda store: check_store_id(settings, records, store), stores)) == [None] * 16


def test_snapshots_of_an_earlier_version_are_not_taken_to_be_in_an_empty_store(
    client: redis.Redis, records: RedisRecords, settings: Settings, tmp_path: Path
) -> None:
    """The disk is not mounted at the first start after an upgrade, and no run has saved a checkpoint yet."""
    client.hset("tinsmith:models:s:train:0", mapping={"applied": "3", "snapshot": "models/s/7"})
    client.zadd("tinsmith:index:models", {"s:train:0": 0})
    store = folder(tmp_path / "objects")
    with pytest.raises(SetupError, match="mount its disk"):
        check_store_id(settings, records, store)
    assert store.list("") == []
    store.put_new("models/s/7/manifest.json", b"{}")
    check_store_id(settings, records, store)


def test_a_store_that_does_not_show_at_once_what_it_has_stored_is_no_error(
    records: RedisRecords, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder(tmp_path / "objects")
    with monkeypatch.context() as late:
        late.setattr(store, "put_new", lambda key, content: None)
        check_store_id(settings, records, store)
    check_store_id(settings, records, store)
    assert store.list("") == [STORE_ID]


@pytest.mark.parametrize("other", [False, True])
def test_another_or_an_empty_store_is_refused_and_stays_as_it_is(
    other: bool, records: RedisRecords, settings: Settings, valkey: str, tmp_path: Path
) -> None:
    check_store_id(settings, records, folder(tmp_path / "first"))
    wrong = folder(tmp_path / "objects")
    if other:
        wrong.put_new(STORE_ID, b"0" * 32)
    before = wrong.list("")
    for _ in range(2):
        with pytest.raises(SetupError) as refused:
            check_store_id(settings, records, wrong)
    said = str(refused.value)
    assert str(tmp_path / "objects") in said and valkey in said and "\n" not in said
    for remedy in ("mount its disk", "store.url", "copy all objects", "tinsmith rebuild"):
        assert remedy in said
    assert wrong.list("") == before


def test_an_emptied_state_server_takes_the_id_of_the_store(
    client: redis.Redis, records: RedisRecords, settings: Settings, tmp_path: Path
) -> None:
    store = folder(tmp_path / "objects")
    check_store_id(settings, records, store)
    first = store.read(STORE_ID)
    client.flushall()
    check_store_id(settings, records, store)
    assert store.read(STORE_ID) == first
    with pytest.raises(SetupError):
        check_store_id(settings, records, folder(tmp_path / "empty"))


def test_data_of_an_earlier_commit_gets_an_id_unless_its_checkpoints_are_not_there(
    records: RedisRecords, settings: Settings, tmp_path: Path
) -> None:
    records.put(Checkpoint.namespace, "tinker://session:train:0/weights/a", {"prefix": '"x"'})
    with pytest.raises(SetupError):
        check_store_id(settings, records, folder(tmp_path / "empty"))
    store = folder(tmp_path / "objects")
    store.put_new(f"{MODELS}/session:train:0/weights/a/3-1/manifest.json", b"{}")
    check_store_id(settings, records, store)
    assert STORE_ID in store.list("")


class Away(FolderStore):
    def read(self, key: str) -> bytes:
        raise Unavailable("the S3 server does not answer")


def test_a_server_that_is_away_at_the_start_is_no_error(
    records: RedisRecords, settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = folder(tmp_path / "objects")
    caplog.set_level(logging.WARNING)
    with connect("redis://127.0.0.1:1/0") as nobody:
        check_store_id(settings, RedisRecords(nobody), store)
    check_store_id(settings, records, Away(tmp_path / "objects", "", ""))
    assert len(caplog.records) == 2 and "was not checked" in caplog.text
    assert store.list("") == []
