"""Stand-in for downloads from the Hugging Face Hub: lists of files, and the files, of the models in a folder. It can be
silent."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import Handler, serving

_COMMIT = "1" * 40
_DESCRIBED = re.compile(r"/api/models/([\w-]+/[\w-]+)(/revision/\w+)?")
_LISTED = re.compile(r"/api/models/([\w-]+/[\w-]+)/tree/\w+")
_FILE = re.compile(r"/([\w-]+/[\w-]+)/resolve/\w+/(.+)")


@dataclass
class Hub:
    """`repos`: the folder of each model. The files of those in `gated` are refused, and the weights of those in
    `cut_off` end early.
    `sent`: the names of the files that were sent. `asked`: the models that were asked for, once for each request. While
    `awake` is not set, it accepts connections, and answers nothing."""

    url: str = ""
    repos: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    awake: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.awake.set()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Lets this process fetch from the Hub at this address, into this cache. Callers wait for long, because a busy
    machine may need more than five seconds for a fetch."""
    monkeypatch.setattr("app.stores.hub_cache._PATIENCE_S", 60.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    form = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", form)


@contextlib.contextmanager
def hub_of_models() -> Iterator[Hub]:
    found = Hub()
    with serving(_handler(found)) as found.url:
        try:
            yield found
        finally:
            found.awake.set()


def _handler(hub: Hub) -> type[Handler]:
    class HubHandler(Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that waited for a silent Hub may have gone
                self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            match = next((found for form in (_DESCRIBED, _LISTED, _FILE) if (found := form.fullmatch(path))), None)
            if match:
                hub.asked.append(match[1])
            hub.awake.wait(60)
            folder = hub.repos.get(match[1]) if match else None
            if match is None or folder is None:
                self._refuse(404, "RepoNotFound")
            elif match.re is _DESCRIBED:
                self.answer(200, {"id": match[1], "sha": _COMMIT, "siblings": []})
            elif match.re is _LISTED:
                self.answer(200, [_entry(folder, file) for file in _files(folder)])
            elif match[1] in hub.gated:
                self._refuse(403, "GatedRepo")
            else:
                self._send(match[1], folder / match[2])

        def _send(self, repo: str, file: Path) -> None:
            if not file.is_file():
                self._refuse(404, "EntryNotFound")
                return
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                hub.sent.append(file.name)
                self.wfile.write(
                    data[: len(data) // 2] if repo in hub.cut_off and file.suffix == ".safetensors" else data
                )

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return HubHandler


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    oid = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": str(file.relative_to(folder)), "size": len(data), "oid": oid}
