"""What every ObjectStore promises, over a folder and over a real S3 server."""

from __future__ import annotations

import io
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from app.errors import BadRequest, Forbidden, NotFound, SetupError, Unavailable
from app.settings import ApiSettings, Settings, StoreSettings
from app.stores.interfaces import ObjectStore
from app.stores.objects import FolderStore, create
from app.stores.objects.s3 import S3Store
from tests.faults.proxy import Proxy
from tests.servers_s3 import start_s3

KEY = "models/1f0c:train:0/weights/step-1/g1/adapter_model.safetensors"
PUBLIC = "http://tinsmith.example:8000"


@pytest.fixture(scope="module")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    with start_s3(tmp_path_factory.mktemp("s3")) as settings:
        yield settings


def folder_settings(root: Path) -> Settings:
    return Settings(
        url_secret="a secret of the tests",
        store=StoreSettings(url=f"file://{root}"),
        api=ApiSettings(public_url=PUBLIC),
    )


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
    """Follow a signed URL as a client without a key would; raises Forbidden where the server refuses."""

    def through_api(url: str) -> bytes:
        parts = urlsplit(url)
        key = unquote(parts.path.removeprefix("/api/v1/objects/"))
        query = parse_qs(parts.query)
        assert isinstance(store, FolderStore)
        return store.open_signed(key, int(query["expires"][0]), query["signature"][0]).read_bytes()

    def over_http(url: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            raise (Forbidden if error.code == 403 else NotFound)(str(error)) from None

    return through_api if isinstance(store, FolderStore) else over_http


def test_what_was_put_is_read_back_whole(store: ObjectStore, tmp_path: Path):
    content = os.urandom(3_000_001)
    source = tmp_path / "source"
    source.write_bytes(content)

    assert store.put_new(KEY, source)

    store.get(KEY, tmp_path / "deep" / "er" / "target")
    assert (tmp_path / "deep" / "er" / "target").read_bytes() == content
    assert store.read(KEY) == content


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
    contents = [bytes([i]) * 300_000 for i in range(8)]
    barrier = threading.Barrier(len(contents))

    def write(content: bytes) -> bool:
        barrier.wait()
        return store.put_new(KEY, content)

    with ThreadPoolExecutor(len(contents)) as pool:
        won = list(pool.map(write, contents))

    assert sum(won) == 1
    assert store.read(KEY) == contents[won.index(True)]


def test_a_missing_object_is_not_found(store: ObjectStore, tmp_path: Path):
    with pytest.raises(NotFound, match="no/such/key"):
        store.read("no/such/key")
    with pytest.raises(NotFound):
        store.get("no/such/key", tmp_path / "target")
    assert not (tmp_path / "target").exists()


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
        lambda: store.delete([key]),
        lambda: store.presign(key, 60),
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


def test_a_signed_url_stops_working_when_it_expires(store: ObjectStore, download: Callable[[str], bytes]):
    store.put_new(KEY, b"weights")
    url = store.presign(KEY, 1)
    deadline = time.monotonic() + 20
    with pytest.raises(Forbidden):
        while time.monotonic() < deadline:
            download(url)
            time.sleep(0.1)


def test_two_stores_over_the_same_settings_see_each_other(store: ObjectStore, settings: Settings):
    store.put_new(KEY, b"1")
    assert create(settings).read(KEY) == b"1"


class TestFolder:
    def test_without_a_url_the_objects_lie_in_the_data_folder(self, tmp_path: Path):
        create(Settings(data_dir=tmp_path)).put_new("a/b", b"1")
        assert (tmp_path / "objects" / "a" / "b").read_bytes() == b"1"

    def test_a_write_that_breaks_off_is_never_visible(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        store = create(folder_settings(tmp_path / "objects"))
        with pytest.raises(Unavailable):
            store.put_new("a/b", tmp_path / "no such source")
        monkeypatch.setattr(os, "fsync", _no_space)
        with pytest.raises(Unavailable, match="No space left"):
            store.put_new("a/b", b"1" * 100_000)
        assert store.list("") == []
        assert [p for p in (tmp_path / "objects").rglob("*") if p.is_file()] == []

    def test_a_fetch_that_breaks_off_is_never_visible(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        store = create(folder_settings(tmp_path / "objects"))
        store.put_new("a", b"1" * 100_000)
        monkeypatch.setattr(os, "fsync", _no_space)
        with pytest.raises(Unavailable):
            store.get("a", tmp_path / "cache" / "a")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_what_a_killed_writer_left_is_removed_once_it_is_old(self, tmp_path: Path):
        create(folder_settings(tmp_path))
        old, young = tmp_path / ".unfinished" / "old", tmp_path / ".unfinished" / "young"
        for path in (old, young):
            path.write_bytes(b"half")
        os.utime(old, (0, 0))
        assert create(folder_settings(tmp_path)).list("") == []
        assert (old.exists(), young.exists()) == (False, True)

    def test_writing_beside_a_delete_of_the_same_folder_succeeds(self, tmp_path: Path):
        store = create(folder_settings(tmp_path))

        def churn(name: str) -> None:
            for _ in range(150):
                assert store.put_new(f"m/deep/{name}", b"1")
                store.delete([f"m/deep/{name}"])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, "abcd"))
        assert not (tmp_path / "m").exists()

    def test_a_key_below_another_key_is_an_error_and_not_a_silent_loss(self, tmp_path: Path):
        store = create(folder_settings(tmp_path))
        store.put_new("a", b"1")
        with pytest.raises(Unavailable, match="Not a directory"):
            store.put_new("a/b", b"2")

    def test_a_changed_signature_or_expiry_is_refused(self, tmp_path: Path):
        store = create(folder_settings(tmp_path))
        assert isinstance(store, FolderStore)
        store.put_new(KEY, b"1")
        query = parse_qs(urlsplit(store.presign(KEY, 60)).query)
        expires, signature = int(query["expires"][0]), query["signature"][0]
        assert store.open_signed(KEY, expires, signature).read_bytes() == b"1"
        for bad in ("", "0" * 64, signature.upper(), signature[:-1], "ü"):
            with pytest.raises(Forbidden):
                store.open_signed(KEY, expires, bad)
        with pytest.raises(Forbidden):
            store.open_signed(KEY, expires + 1, signature)

    def test_a_signed_url_of_a_deleted_object_is_not_found(self, tmp_path: Path):
        store = create(folder_settings(tmp_path))
        assert isinstance(store, FolderStore)
        store.put_new(KEY, b"1")
        url = urlsplit(store.presign(KEY, 60))
        store.delete([KEY])
        query = parse_qs(url.query)
        with pytest.raises(NotFound):
            store.open_signed(KEY, int(query["expires"][0]), query["signature"][0])

    def test_a_signed_url_starts_with_the_public_url(self, tmp_path: Path):
        url = create(folder_settings(tmp_path)).presign("models/s:train:0/x", 60)
        assert url.startswith(f"{PUBLIC}/api/v1/objects/models/s%3Atrain%3A0/x?expires=")

    def test_without_a_url_secret_nothing_can_be_signed(self, tmp_path: Path):
        store = create(Settings(data_dir=tmp_path))
        assert isinstance(store, FolderStore)
        with pytest.raises(SetupError, match="url_secret"):
            store.presign(KEY, 60)
        forged = FolderStore(tmp_path, "x", PUBLIC)
        forged._secret = b""
        with pytest.raises(Forbidden):
            store.open_signed(KEY, 2**40, forged._sign(KEY, 2**40))

    @pytest.mark.parametrize("url", ["ftp://host/x", "file://relative/folder", "objects", "file://"])
    def test_an_unusable_url_is_named(self, url: str):
        with pytest.raises(SetupError, match=url):
            create(Settings(store=StoreSettings(url=url)))

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(SetupError, match=r"set store\.url"):
            create(folder_settings(tmp_path / "file" / "objects"))


class TestS3:
    def test_a_wrong_secret_is_refused_at_the_start(self, s3_settings: StoreSettings):
        wrong = s3_settings.model_copy(update={"secret_key": "not the secret"})
        with pytest.raises(SetupError, match=r"check store\.access_key"):
            create(Settings(store=wrong))

    def test_a_server_that_is_not_there_is_named_at_the_start(self):
        with pytest.raises(SetupError, match=r"127\.0\.0\.1:9 does not answer"):
            create(Settings(store=StoreSettings(url="http://127.0.0.1:9/bucket", access_key="a", secret_key="b")))

    @pytest.mark.parametrize("path", ["", "/", "/UPPER_CASE", "/a/b"])
    def test_a_url_without_a_usable_bucket_is_refused(self, s3_settings: StoreSettings, path: str):
        bad = s3_settings.model_copy(update={"url": s3_settings.url.rpartition("/")[0] + path})
        with pytest.raises(SetupError, match=r"store\.url"):
            create(Settings(store=bad))

    def test_a_url_with_credentials_in_it_is_refused_without_showing_them(self):
        with pytest.raises(SetupError) as caught:
            create(Settings(store=StoreSettings(url="http://me:hush@127.0.0.1:9/bucket")))
        assert "hush" not in str(caught.value)

    def test_an_outage_later_is_unavailable_and_passes(self, tmp_path: Path):
        with start_s3(tmp_path) as server:
            store = create(Settings(store=server))
            store.put_new(KEY, b"1")
        for call in (
            lambda: store.put_new(KEY, b"1"),
            lambda: store.read(KEY),
            lambda: store.list(""),
            lambda: store.delete([KEY]),
        ):
            with pytest.raises(Unavailable, match="does not answer") as caught:
                call()
            assert "Signature" not in str(caught.value)

    def test_a_process_may_start_during_an_outage_and_stores_once_it_is_over(self, s3_settings: StoreSettings):
        with Proxy(s3_settings.url + "-later") as line:
            line.refuse()
            settings = Settings(store=s3_settings.model_copy(update={"url": line.url}))
            store = create(settings, may_be_away=True)
            with pytest.raises(Unavailable, match="does not answer"):
                store.put_new(KEY, b"1")
            line.go_on()
            assert store.put_new(KEY, b"1"), "the bucket was not made"
            assert store.read(KEY) == b"1"

    def test_wrong_credentials_are_refused_even_where_the_store_may_be_away(self, s3_settings: StoreSettings):
        wrong = s3_settings.model_copy(update={"secret_key": "not the secret"})
        with pytest.raises(SetupError, match=r"check store\.access_key"):
            create(Settings(store=wrong), may_be_away=True)

    def test_signed_urls_name_the_public_address(self, s3_settings: StoreSettings):
        public = s3_settings.model_copy(update={"public_url": "https://files.example/bucket"})
        assert create(Settings(store=public)).presign("a", 60).startswith("https://files.example/")

    def test_a_large_file_goes_up_in_parts_whole_and_only_once(self, s3_settings: StoreSettings, tmp_path: Path):
        """At the same moment SeaweedFS 4.48 lets two completions through now and then: the winner is still whole."""
        store = S3Store(s3_settings, part_bytes=5 * 2**20)
        contents = [os.urandom(11 * 2**20) for _ in range(3)]
        for i, content in enumerate(contents):
            (tmp_path / str(i)).write_bytes(content)

        with ThreadPoolExecutor(3) as pool:
            won = list(pool.map(lambda i: store.put_new("large", tmp_path / str(i)), range(3)))

        winners = [content for content, one_won in zip(contents, won, strict=True) if one_won]
        assert store.read("large") in winners
        assert not store.put_new("large", tmp_path / "0")
        assert store.read("large") in winners
        assert _unfinished_uploads(store) == 0
        store.delete(["large"])

    def test_a_large_file_that_breaks_off_is_never_visible(self, s3_settings: StoreSettings):
        class Breaking(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() > 0:
                    raise OSError(5, "Input/output error")
                return super().read(size)

        store = S3Store(s3_settings, part_bytes=5 * 2**20)
        with pytest.raises(OSError, match="Input/output"):
            store._put("broken", Breaking(bytes(11 * 2**20)))
        assert store.list("broken") == []
        assert _unfinished_uploads(store) == 0


def _unfinished_uploads(store: S3Store) -> int:
    return len(store._client._list_multipart_uploads(store._bucket).uploads)


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")
