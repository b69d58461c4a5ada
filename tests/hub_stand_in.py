"""Stand-in for uploads to the Hugging Face Hub: caller's identity, a new repository, a commit with its files."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.http_server import Handler, serving

TOKEN = "hf_stand_in"


@dataclass
class Hub:
    """The stand-in's state. `repos`: the files of each repository, by name; `private`: the private repositories."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    found = Hub()
    with serving(_handler(found)) as found.url:
        yield found


def _handler(hub: Hub) -> type[Handler]:
    class HubHandler(Handler):
        def do_HEAD(self) -> None:
            self.answer(404, {"error": "Entry not found"})

        def do_GET(self) -> None:
            if self.path != "/api/whoami-v2":
                self.answer(404, {"error": "Entry not found"})
            elif self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid credentials"})
            else:
                self.answer(200, {"type": "user", "name": "tester", "orgs": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = self.path.partition("?")[0].removeprefix("/api/")
            if path == "validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif path == "repos/create":
                self._create(json.loads(body))
            elif "/preupload/" in path:
                files = [{"path": one["path"]} for one in json.loads(body)["files"]]
                self.answer(200, {"files": [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in files]})
            else:
                self._commit(path, [json.loads(line) for line in body.splitlines()])

        def _create(self, asked: dict[str, Any]) -> None:
            repo = f"{asked['organization']}/{asked['name']}"
            hub.repos.setdefault(repo, {})
            if asked.get("private") or asked.get("visibility") == "private":
                hub.private.add(repo)
            self.answer(200, {"url": f"{hub.url}/{repo}", "name": repo})

        def _commit(self, path: str, lines: list[dict[str, Any]]) -> None:
            repo = path.removeprefix("models/").partition("/commit/")[0]
            files = [line["value"] for line in lines if line["key"] == "file"]
            hub.repos[repo].update({one["path"]: base64.b64decode(one["content"]) for one in files})
            self.answer(
                200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/{repo}/commit/{'0' * 40}"}
            )

    return HubHandler
