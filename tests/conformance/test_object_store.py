"""Promises of every ObjectStore, tested on a folder and on a real S3 server."""

from __future__ import annotations

import io
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from prometheus_client import REGISTRY

from app.errors import BadRequest, Forbidden, NotFound, TooLarge
from app.settings import Settings, StoreSettings
from app.stores.objects import create
from app.stores.objects.base import ObjectStore, file_entry
from app.stores.objects.folder import FolderStore
from app.stores.objects.s3 import S3Store
from tests.conformance.object_stores import KEY, folder_settings


@pytest.fixture(params=["folder", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if request.param == "folder":
        return folder_settings(tmp_path / "objects")
    server: StoreSettings = request.getfixturevalue("s3_settings")
    return Settings(store=server)


@pytest.fixture
def store(settings: Settings) -> Iterator[ObjectStore]:
    made = create(settings)
    yield made
    made.delete(made.list(""))


@pytest.fixture
def download(store: ObjectStore) -> Callable[[str], bytes]:
    """Follows a signed URL as a client without a key does. Raises Forbidden when the server refuses."""

    def through_api(url: str) -> bytes:
        parts = urlsplit(url)
        key = unquote(parts.path.removeprefix("/api/v1/objects/"))
        query = parse_qs(parts.query)
        assert isinstance(store, FolderStore)
        return store.open_signed(key, int(query["expires"][0]), query["signature"][0]).read_bytes()

    def over_http(url: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            raise (Forbidden if error.code == 403 else NotFound)(str(error)) from None

    return through_api if isinstance(store, FolderStore) else over_http


@pytest.fixture
def send(store: ObjectStore) -> Callable[[str, bytes], None]:
    """Sends an object to a signed URL as a client without a key does. Raises Forbidden when the server refuses."""

    def through_api(url: str, content: bytes) -> None:
        parts = urlsplit(url)
        most, _, key = unquote(parts.path.removeprefix("/api/v1/uploads/")).partition("/")
        query = parse_qs(parts.query)
        assert isinstance(store, FolderStore)
        store.check_put(key, int(most), int(query["expires"][0]), query["signature"][0])
        store.replace(key, io.BytesIO(content))

    def over_http(url: str, content: bytes) -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, content, method="PUT"), timeout=60):
                pass
        except urllib.error.HTTPError as error:
            raise Forbidden(str(error)) from None

    return through_api if isinstance(store, FolderStore) else over_http


def test_what_was_put_is_read_back_whole(store: ObjectStore, tmp_path: Path):
    content = os.urandom(3_000_001)
    source = tmp_path / "source"
    source.write_bytes(content)

    assert store.put_new(KEY, source)

    store.get(KEY, tmp_path / "deep" / "er" / "target")
    assert (tmp_path / "deep" / "er" / "target").read_bytes() == content
    assert store.read(KEY) == content
    assert store.entry(KEY) == file_entry(source)


def test_a_fetch_of_more_bytes_than_may_come_leaves_nothing(store: ObjectStore, tmp_path: Path):
    store.put_new(KEY, bytes(3_000_000))
    with pytest.raises(TooLarge, match="more than 2999999 bytes"):
        store.get(KEY, tmp_path / "cache" / "target", 2_999_999)
    assert list((tmp_path / "cache").iterdir()) == []
    store.get(KEY, tmp_path / "target", 3_000_000)
    assert (tmp_path / "target").stat().st_size == 3_000_000


def test_bytes_and_an_empty_object_can_be_put(store: ObjectStore):
    assert store.put_new("a", b"some bytes")
    assert store.put_new("empty", b"")
    assert (store.read("a"), store.read("empty")) == (b"some bytes", b"")


def test_a_later_change_to_the_source_does_not_reach_the_object(store: ObjectStore, tmp_path: Path):
    source = tmp_path / "source"
    source.write_bytes(b"before")
    store.put_new(KEY, source)
    source.write_bytes(b"after!")
    assert store.read(KEY) == b"before"


def test_an_object_is_never_replaced(store: ObjectStore):
    assert store.put_new(KEY, b"first")
    assert not store.put_new(KEY, b"second")
    assert store.read(KEY) == b"first"


def test_of_concurrent_writers_of_one_key_exactly_one_wins(store: ObjectStore):
    """Checks this for several keys, because a fast disk may miss a race."""
    contents = [bytes([i]) * 300_000 for i in range(8)]
    barrier = threading.Barrier(len(contents))

    def write(key: str, content: bytes) -> bool:
        barrier.wait()
        return store.put_new(key, content)

    for key in (f"{KEY}-{number}" for number in range(10)):
        with ThreadPoolExecutor(len(contents)) as pool:
            won = list(pool.map(partial(write, key), contents))
        assert sum(won) == 1
        assert store.read(key) == contents[won.index(True)]


def test_a_missing_object_is_not_found(store: ObjectStore, tmp_path: Path):
    with pytest.raises(NotFound, match="no/such/key"):
        store.read("no/such/key")
    with pytest.raises(NotFound, match="no/such/key"):
        store.size("no/such/key")
    with pytest.raises(NotFound, match="no/such/key"):
        store.entry("no/such/key")
    with pytest.raises(NotFound):
        store.get("no/such/key", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_copy_outlives_its_source(store: ObjectStore):
    content = os.urandom(300_000)
    store.put_new(KEY, content)
    for _ in range(2):
        store.copy(KEY, "models/other:train:0/weights/step-1/g1/adapter_model.safetensors")
    store.delete([KEY])
    assert store.read("models/other:train:0/weights/step-1/g1/adapter_model.safetensors") == content


def test_the_copy_goes_alone_and_of_nothing_there_is_none(store: ObjectStore):
    store.put_new(KEY, b"weights")
    store.copy(KEY, "a/copy")
    store.delete(["a/copy"])
    assert store.read(KEY) == b"weights"
    with pytest.raises(NotFound):
        store.copy("no/such/key", "a/copy")
    assert store.list("a/") == []


def test_a_failed_fetch_leaves_the_old_file_and_no_litter(store: ObjectStore, tmp_path: Path):
    target = tmp_path / "cache" / "target"
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(NotFound):
        store.get("no/such/key", target)
    assert [p.name for p in target.parent.iterdir()] == ["target"]
    assert target.read_bytes() == b"old"


def test_keys_are_listed_by_any_prefix_in_order(store: ObjectStore):
    keys = ["m/b:1/x", "m/b:1/a/y", "m/b:10/x", "m/a", "n/z"]
    for key in keys:
        store.put_new(key, b"1")
    assert store.list("") == sorted(keys)
    assert store.list("m/b:1") == ["m/b:1/a/y", "m/b:1/x", "m/b:10/x"]
    assert store.list("m/b:1/") == ["m/b:1/a/y", "m/b:1/x"]
    assert store.list("absent/") == []


def plant(store: ObjectStore, name: str) -> None:
    """Writes a file into the store, as a disk or another program may."""
    if isinstance(store, FolderStore):
        (store._root / name).write_bytes(b"")
    else:
        assert isinstance(store, S3Store)
        store._client.put_object(store._bucket, name, io.BytesIO(), 0)


def test_a_foreign_file_with_a_name_that_is_no_key_is_not_listed(store: ObjectStore):
    store.put_new("foreign/a", b"1")
    for name in ("foreign/.nfs00a1", "foreign/a copy", "foreign/.DS_Store"):
        plant(store, name)
    assert store.list("foreign/") == list(store.page("foreign/", "foreign/", 2)) == ["foreign/a"]
    store.delete(store.list(""))
    assert store.list("") == []


def test_keys_are_listed_a_page_at_a_time_behind_a_key_or_another_text(store: ObjectStore):
    keys = [f"pages/b:1/{name}" for name in ("a", "b/x", "c", "d", "e")]
    for key in (*keys, "pages/b:10/x", "pages/a"):
        store.put_new(key, b"1")
    assert store.page("pages/b:1/", "pages/b:1/", 2) == keys[:2]
    assert store.page("pages/b:1/", "pages/b:1/b/x", 3) == keys[2:]
    assert store.page("pages/b:1/", "pages/b:1/b1", 9) == keys[2:]
    assert store.page("pages/b:1/", "pages/b:1/e", 2) == store.page("absent/", "absent/", 2) == []


def test_folders_are_the_next_parts_of_keys_that_go_on(store: ObjectStore):
    for key in ("folders/b:1/x", "folders/b:1/a/y", "folders/-/x", "folders/a", "n/z"):
        store.put_new(key, b"1")
    assert store.folders("folders/") == ["-", "b:1"]
    assert store.folders("absent/") == []


def test_more_keys_than_one_page_of_a_server_are_all_listed_and_deleted(store: ObjectStore):
    keys = [f"many/{i:04}" for i in range(1_050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put_new(key, b""), keys))
    assert store.list("many/") == keys
    store.delete(keys)
    assert store.list("many/") == []


def test_a_deleted_object_is_gone_and_its_key_free_again(store: ObjectStore):
    store.put_new(KEY, b"first")
    store.delete([KEY, "never/there"])
    assert store.list("") == []
    with pytest.raises(NotFound):
        store.read(KEY)
    assert store.put_new(KEY, b"second")
    assert store.read(KEY) == b"second"


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a//b", "a/", "../x", "a/../b", "a/./b", ".hidden", "a\0b", "ä"])
def test_a_key_that_could_leave_the_store_is_refused(store: ObjectStore, key: str, tmp_path: Path):
    for call in (
        lambda: store.put_new(key, b""),
        lambda: store.get(key, tmp_path / "t"),
        lambda: store.read(key),
        lambda: store.copy(key, "a/copy"),
        lambda: store.copy(KEY, key),
        lambda: store.delete([key]),
        lambda: store.size(key),
        lambda: store.entry(key),
        lambda: store.presign(key, 60),
        lambda: store.presign_put(key, 60, 10),
    ):
        with pytest.raises(BadRequest, match="not an object key"):
            call()


def test_a_prefix_that_could_leave_the_store_is_refused(store: ObjectStore):
    with pytest.raises(BadRequest):
        store.list("../")


def test_a_signed_url_gives_the_object_without_a_key(store: ObjectStore, download: Callable[[str], bytes]):
    store.put_new(KEY, b"weights")
    assert download(store.presign(KEY, 60)) == b"weights"


def test_a_signed_url_for_another_key_is_refused(store: ObjectStore, download: Callable[[str], bytes]):
    store.put_new("a/mine", b"1")
    store.put_new("a/else", b"2")
    with pytest.raises(Forbidden):
        download(store.presign("a/mine", 60).replace("/mine", "/else"))


def lifetime_s(url: str) -> float:
    """The seconds that a signed URL has left; for a URL of an S3 server, the seconds that it was signed for."""
    query = parse_qs(urlsplit(url).query)
    return int(query["expires"][0]) - time.time() if "expires" in query else int(query["X-Amz-Expires"][0])


def test_a_signed_url_stops_working_when_it_expires(store: ObjectStore, download: Callable[[str], bytes]):
    store.put_new(KEY, b"weights")
    url = store.presign(KEY, 1)
    assert lifetime_s(url) <= 1
    assert lifetime_s(store.presign_put(KEY, 1, 10)) <= 1
    deadline = time.monotonic() + 120
    with pytest.raises(Forbidden):
        while time.monotonic() < deadline:
            download(url)
            time.sleep(0.1)


def test_an_object_is_sent_to_a_signed_url_without_a_key(store: ObjectStore, send: Callable[[str, bytes], None]):
    url = store.presign_put(KEY, 60, 1000)
    for content in (b"first", b"second try"):
        send(url, content)
        assert (store.read(KEY), store.size(KEY)) == (content, len(content))


def test_a_signed_url_takes_no_other_object(store: ObjectStore, send: Callable[[str, bytes], None]):
    for forged in (
        store.presign_put("a/mine", 60, 1000).replace("/mine", "/else"),
        store.presign("a/mine", 60).replace("/objects/", "/uploads/1000/"),
    ):
        with pytest.raises(Forbidden):
            send(forged, b"x")
    assert store.list("") == []


def test_two_stores_over_the_same_settings_see_each_other(store: ObjectStore, settings: Settings):
    store.put_new(KEY, b"1")
    assert create(settings).read(KEY) == b"1"


def test_each_call_is_timed(store: ObjectStore, tmp_path: Path):
    def counts() -> dict[str, float]:
        sample = partial(REGISTRY.get_sample_value, "tinsmith_object_store_seconds_count")
        return {
            name: sample({"operation": name}) or 0 for name in ("put", "get", "read", "copy", "list", "size", "delete")
        }

    before = counts()
    store.put_new(KEY, b"content")
    store.get(KEY, tmp_path / "file")
    store.read(KEY)
    store.copy(KEY, f"{KEY}-copy")
    store.list("")
    store.entry(KEY)
    store.size(KEY)
    with pytest.raises(NotFound):
        store.size(f"{KEY}-missing")
    store.delete([KEY])
    assert {name: count - before[name] for name, count in counts().items()} == {
        **dict.fromkeys(before, 1),
        "get": 2,
        "size": 2,
    }
