"""An S3 store behind a proxy that answers in the server's place. tests/conformance covers its other promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.errors import Unavailable
from app.settings import StoreSettings
from app.stores.objects.s3 import S3Store
from tests.http_server import Handler, serving

# What the server answers to the beginning of an upload in parts, to each part, and to their completion.
ANSWERS = {
    "begun": b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>",
    "part": b"",
    "joined": b"<CompleteMultipartUploadResult/>",
}
PAGES = {"no page": b"", "HTML": b"<!doctype html><p>Sign in", "XHTML": b"<html/>"}


class Server(Handler):
    """The few calls of S3 that one upload in parts makes. A proxy answers the call `replaced` with `page`."""

    replaced, page, probes = "", b"", 0

    def do_HEAD(self) -> None:
        self._say(200)

    def do_GET(self) -> None:
        self._say(200, b"<ListMultipartUploadsResult/>")

    def do_PUT(self) -> None:
        if "partNumber" in self.path:
            self._say_or_replace("part")
        else:
            Server.probes += 1
            self._say(200 if Server.probes == 1 else 412)

    def do_POST(self) -> None:
        self._say_or_replace("joined" if "uploadId" in self.path else "begun")

    def do_DELETE(self) -> None:
        self._say(204)

    def _say_or_replace(self, call: str) -> None:
        if call == self.replaced:
            self._say(200, self.page)
        else:
            self._say(200, ANSWERS[call], ETag='"1"')

    def _say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    for name in ("replaced", "page", "probes"):
        monkeypatch.setattr(Server, name, getattr(Server, name))
    with serving(Server) as url:
        yield S3Store(StoreSettings(url=f"{url}/bucket", access_key="a", secret_key="b"), part_bytes=4)


def test_a_file_in_parts_is_stored_when_the_server_itself_answers(store: S3Store):
    assert store.put_new("a/key", b"in parts")


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("call", ANSWERS)
def test_an_answer_that_is_not_the_servers_is_an_outage_and_no_stored_file(store: S3Store, call: str, page: bytes):
    """A trainer takes an unknown error for a broken backend, and then restores all its models."""
    Server.replaced, Server.page = call, page
    with pytest.raises(Unavailable, match="does not answer"):
        store.put_new("a/key", b"in parts")
