"""A proxy between the SDK and the API that records every acknowledged call and its results."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import ClassVar
from urllib.parse import urlsplit

from tests.http_server import Handler, serving
from tests.upgrade.calls import Call, Result

_POLL = "/api/v1/retrieve_future"
_HOPS = frozenset({"host", "connection", "content-length", "accept-encoding", "transfer-encoding", "date", "server"})
# Longer than a long poll lasts.
_TIMEOUT_S = 120


class Recorder:
    """Recorder of calls. `calls` are in the order in which they were acknowledged."""

    def __init__(self) -> None:
        self.url = ""
        self._calls: dict[str, Call] = {}
        self._lock = threading.Lock()

    @property
    def calls(self) -> list[Call]:
        with self._lock:
            return list(self._calls.values())

    def note(self, path: str, content_type: str, body: bytes, result: Result) -> None:
        """Records a successful exchange."""
        with self._lock:
            if path == _POLL:
                request_id = json.loads(body)["request_id"]
                self._calls[request_id] = replace(self._calls[request_id], result=result)
            elif result.content_type.startswith("application/json") and "request_id" in result.fields:
                call = Call(path, content_type, body, result.fields)
                self._calls.setdefault(call.request_id, call)


@contextmanager
def recording(api: str) -> Iterator[Recorder]:
    """Runs a recorder on its own port, before the API at `api`."""
    recorder = Recorder()

    class Recording(_Proxy):
        target, keeper = urlsplit(api).netloc, recorder

    with serving(Recording) as recorder.url:
        yield recorder


class _Proxy(Handler):
    protocol_version = "HTTP/1.1"
    target: ClassVar[str]
    keeper: ClassVar[Recorder]

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOPS}
        connection = HTTPConnection(self.target, timeout=_TIMEOUT_S)
        try:
            connection.request(self.command, self.path, body, kept)
            response = connection.getresponse()
            answer = response.read()
        except OSError:
            # The API was killed on purpose: this connection breaks in the same way.
            self.close_connection = True
            return
        finally:
            connection.close()
        if response.status == 200:
            result = Result(response.headers["Content-Type"], answer)
            self.keeper.note(self.path, self.headers.get("Content-Type", ""), body, result)
        self.send_response(response.status)
        for name, value in response.headers.items():
            if name.lower() not in _HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
