"""Promises of the S3 store beyond those of every ObjectStore."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3

from app.errors import SetupError, Unavailable
from app.settings import Settings, StoreSettings
from app.stores.objects import create, s3
from app.stores.objects.s3 import S3Store
from tests.conformance.object_stores import KEY
from tests.faults.proxy import Proxy, Rewriting
from tests.servers_s3 import start_s3


def test_a_wrong_secret_is_refused_at_the_start(s3_settings: StoreSettings):
    wrong = s3_settings.model_copy(update={"secret_key": "not the secret"})
    with pytest.raises(SetupError, match=r"check store\.access_key"):
        create(Settings(store=wrong))


def test_a_server_that_is_not_there_is_named_at_the_start():
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:9 does not answer"):
        create(Settings(store=StoreSettings(url="http://127.0.0.1:9/bucket", access_key="a", secret_key="b")))


@pytest.mark.parametrize("path", ["", "/", "/UPPER_CASE", "/a/b"])
def test_a_url_without_a_usable_bucket_is_refused(s3_settings: StoreSettings, path: str):
    bad = s3_settings.model_copy(update={"url": s3_settings.url.rpartition("/")[0] + path})
    with pytest.raises(SetupError, match=r"store\.url"):
        create(Settings(store=bad))


def test_a_url_with_credentials_in_it_is_refused_without_showing_them():
    with pytest.raises(SetupError) as caught:
        create(Settings(store=StoreSettings(url="http://me:hush@127.0.0.1:9/bucket")))
    assert "hush" not in str(caught.value)


def test_an_outage_later_is_unavailable_and_passes(tmp_path: Path):
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


def test_a_page_is_one_request_for_its_keys_alone(s3_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch):
    store, asked = S3Store(s3_settings), []
    for number in range(5):
        store.put_new(f"page/{number}", b"1")
    urlopen = store._http.urlopen

    def note(method: str, url: str, **named: object) -> urllib3.BaseHTTPResponse:
        asked.append(parse_qs(urlsplit(url).query))
        return urlopen(method, url, **named)

    monkeypatch.setattr(store._http, "urlopen", note)
    assert store.page("page/", "page/1", 2) == ["page/2", "page/3"]
    assert [(query["max-keys"], query["start-after"]) for query in asked] == [(["2"], ["page/1"])]


def test_an_object_that_was_sent_with_an_encoding_comes_as_it_is_stored(s3_settings: StoreSettings, tmp_path: Path):
    store, bomb = create(Settings(store=s3_settings)), gzip.compress(bytes(2**24))
    url = store.presign_put("uploads/bomb", 60, 2**20)
    assert urllib3.request("PUT", url, body=bomb, headers={"Content-Encoding": "gzip"}).status == 200
    store.get("uploads/bomb", tmp_path / "bomb", len(bomb))
    assert (tmp_path / "bomb").read_bytes() == store.read("uploads/bomb") == bomb
    assert store.entry("uploads/bomb").size == len(bomb)


def ignoring(server: StoreSettings) -> Rewriting:
    """The server behind a proxy through which it never sees If-None-Match."""
    return Rewriting(server.url, b"If-None-Match", b"X-Passed-Along")


def test_a_server_that_ignores_if_none_match_is_refused_at_the_start(s3_settings: StoreSettings):
    with ignoring(s3_settings) as proxy:
        far = s3_settings.model_copy(update={"url": proxy.url})
        for may_be_away in (False, True):
            with pytest.raises(SetupError, match=r"200 and 200, not 200 and 412.*store\.url"):
                S3Store(far, may_be_away=may_be_away)
    assert create(Settings(store=s3_settings)).list("probes") == []


def test_a_server_that_was_away_at_the_start_is_tried_at_the_first_write(s3_settings: StoreSettings):
    with ignoring(s3_settings) as proxy:
        proxy.refuse()
        store = S3Store(s3_settings.model_copy(update={"url": proxy.url}), may_be_away=True)
        proxy.go_on()
        for _ in range(2):
            with pytest.raises(Unavailable, match="honours If-None-Match"):
                store.put_new("not-written", b"1")
    assert create(Settings(store=s3_settings)).list("not-written") == []


def test_parts_whose_upload_was_broken_off_are_removed_when_they_are_old(
    s3_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
):
    store = S3Store(s3_settings)
    store._client._create_multipart_upload(store._bucket, "broken/off", {})

    def left() -> list[str | None]:
        return [upload.object_name for upload in store._client._list_multipart_uploads(store._bucket).uploads]

    S3Store(s3_settings)
    assert left() == ["broken/off"], "its writer may still live"
    monkeypatch.setattr(s3, "_ABANDONED", timedelta(0))
    S3Store(s3_settings)
    assert left() == []


class OnlyHeads(Proxy):
    """From `cut_bodies` on, it forwards the head of each request alone, and ends the connection when the server does.

    By then the server has handled the request. The client gets no answer.
    """

    is_cutting = False

    def cut_bodies(self) -> None:
        self.is_cutting = True
        self.drop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_cutting:
            await super()._serve(reader, writer)
            return
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        back.write(await reader.readuntil(b"\r\n\r\n"))
        back.write_eof()
        await there.read()
        for end in (writer, back):
            end.close()


def test_a_connection_that_breaks_off_before_the_body_leaves_no_object(s3_settings: StoreSettings):
    with OnlyHeads(s3_settings.url) as proxy:
        store = S3Store(s3_settings.model_copy(update={"url": proxy.url}))
        proxy.cut_bodies()
        with pytest.raises(Unavailable):
            store.put_new("cut-off", b"whole")
    store = create(Settings(store=s3_settings))
    assert store.list("cut-off") == []
    assert store.put_new("cut-off", b"whole")
    assert store.read("cut-off") == b"whole"


class Unanswered(Proxy):
    """Ends the connection in place of the answers to some PUTs, which it counts from `count(...)` on."""

    def count(self, *lost: int) -> None:
        self.puts, self.lost, self.is_next = 0, lost, False

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: int | None) -> None:
        while data := await source.read(2**16):
            if data.startswith(b"PUT "):
                self.is_next, self.puts = self.puts in self.lost, self.puts + 1
            if data.startswith(b"HTTP/") and self.is_next:
                return
            sink.write(data)
            await sink.drain()


@pytest.fixture
def unanswered(s3_settings: StoreSettings) -> Iterator[tuple[S3Store, Unanswered]]:
    create(Settings(store=s3_settings))
    with Unanswered(s3_settings.url) as proxy:
        proxy.count()
        yield S3Store(s3_settings.model_copy(update={"url": proxy.url})), proxy


@pytest.mark.parametrize("as_file", [False, True], ids=["bytes", "file"])
def test_a_file_whose_first_answer_was_lost_counts_as_stored(
    unanswered: tuple[S3Store, Unanswered], tmp_path: Path, as_file: bool, caplog: pytest.LogCaptureFixture
):
    store, proxy = unanswered
    (tmp_path / "file").write_bytes(b"content")
    proxy.count(0)
    assert store.put_new(f"unanswered/{as_file}", tmp_path / "file" if as_file else b"content")
    assert proxy.puts == 2
    assert "Signature" not in caplog.text
    assert store.read(f"unanswered/{as_file}") == b"content"
    assert not store.put_new(f"unanswered/{as_file}", b"content"), "a second call is no repeat of the first"


@pytest.mark.parametrize("content", [b"theirs", b"content, and more", b""])
def test_a_repeat_that_finds_the_file_of_another_stores_nothing(unanswered: tuple[S3Store, Unanswered], content: bytes):
    store, proxy = unanswered
    key = f"unanswered/{len(content)}"
    assert store.put_new(key, content)
    proxy.count(0)
    assert not store.put_new(key, b"content")
    assert proxy.puts == 2
    assert store.read(key) == content


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_answer_stops_no_start(unanswered: tuple[S3Store, Unanswered], s3_settings: StoreSettings, lost: int):
    _, proxy = unanswered
    proxy.count(lost)
    S3Store(s3_settings.model_copy(update={"url": proxy.url}))
    assert proxy.puts == 3


def test_a_process_may_start_during_an_outage_and_stores_once_it_is_over(s3_settings: StoreSettings):
    with Proxy(s3_settings.url + "-later") as line:
        line.refuse()
        settings = Settings(store=s3_settings.model_copy(update={"url": line.url}))
        store = create(settings, may_be_away=True)
        with pytest.raises(Unavailable, match="does not answer"):
            store.put_new(KEY, b"1")
        line.go_on()
        assert store.put_new(KEY, b"1"), "the bucket was not made"
        assert store.read(KEY) == b"1"


def test_wrong_credentials_are_refused_even_where_the_store_may_be_away(s3_settings: StoreSettings):
    wrong = s3_settings.model_copy(update={"secret_key": "not the secret"})
    with pytest.raises(SetupError, match=r"check store\.access_key"):
        create(Settings(store=wrong), may_be_away=True)


def test_signed_urls_name_the_public_address(s3_settings: StoreSettings):
    public = s3_settings.model_copy(update={"public_url": "https://files.example/bucket"})
    assert create(Settings(store=public)).presign("a", 60).startswith("https://files.example/")


def test_a_large_file_goes_up_in_parts_whole_and_only_once(s3_settings: StoreSettings, tmp_path: Path):
    """SeaweedFS 4.48 sometimes accepts two completions at the same moment: the winner is still complete."""
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


def test_a_part_fits_in_memory_and_a_huge_file_in_as_many_parts_as_s3_takes():
    """S3 takes at most 10,000 parts of 5 MiB to 5 GiB each."""
    assert 5 * 2**20 <= s3._PART_BYTES <= 2**30
    assert 10_000 * s3._PART_BYTES >= 512 * 2**30


def test_a_large_file_that_breaks_off_is_never_visible(s3_settings: StoreSettings):
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
