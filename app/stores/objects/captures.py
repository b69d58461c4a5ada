"""Captured answers in the object store, `captures/<project>/<run>/<name>`, each encrypted.

A name holds when the answer was kept and when it expires, so a file is deleted by its name alone: also while accounts
are restored, and by a worker with other settings. Without the secret nobody can read the files, neither in the store
nor in a backup of it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import zstandard
from cryptography.fernet import Fernet, InvalidToken

from app.domain.captures import Capture
from app.errors import NotFound
from app.stores.objects.base import ObjectStore

ROOT = "captures"
_DAY_S = 86_400
# A request lists up to 1,000 keys, in some 20 ms.
_MOST_FOLDERS = 20
_NO_RUN = "-"
"""Stands for the run in a key, where a base model was sampled."""
_KEY = re.compile(rf"{ROOT}/([^/]+)/([^/]+)/([0-9]+-([0-9]+)-[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a capture is. `run` is empty for a base model. `name` sorts by time. `expires` is in unix seconds."""

    project: str
    run: str
    name: str
    expires: int

    @property
    def key(self) -> str:
        return _folder(self.project, self.run) + self.name

    @classmethod
    def new(cls, project: str, run: str, created: float, days: int) -> Self:
        expires = int(created) + days * _DAY_S
        return cls(project, run, f"{int(created * 1e6):017d}-{expires}-{uuid.uuid4().hex}", expires)

    @classmethod
    def parse(cls, key: str) -> Self | None:
        """None for a key that is not of a capture."""
        found = _KEY.fullmatch(key)
        return cls(found[1], "" if found[2] == _NO_RUN else found[2], found[3], int(found[4])) if found else None


class CaptureFiles:
    """Writes, lists and removes captures. `secret` is the server's `capture_secret`, and `now` the state server's time
    in unix seconds. Every method raises Unavailable while the object store is away."""

    def __init__(self, objects: ObjectStore, secret: str, now: Callable[[], float]) -> None:
        self._objects, self._now = objects, now
        self._cipher = _cipher(secret) if secret else None

    @property
    def can_keep(self) -> bool:
        """False without a secret: nothing is kept in clear text."""
        return self._cipher is not None

    def add(self, project: str, run: str, capture: Capture, days: int) -> None:
        """Stores a capture for some days. Requires `can_keep`."""
        assert self._cipher is not None
        content = self._cipher.encrypt(zstandard.compress(capture.encode()))
        self._objects.put_new(Place.new(project, run, capture.created, days).key, content)

    def places(self, project: str, run: str | None = None) -> list[Place]:
        """The captures of a project or of one of its runs."""
        return self._places(f"{ROOT}/{project}/" if run is None else _folder(project, run))

    def page(self, project: str, run: str | None, after: str, limit: int) -> list[Place]:
        """The oldest `limit` captures of a project, or of one of its runs, behind the one with the name `after`. The
        object store lists so many of the run, or of each run of the project. Of many runs it lists all captures, 1,000
        in a request."""
        if run is None:
            folders = [f"{ROOT}/{project}/{name}/" for name in self._objects.folders(f"{ROOT}/{project}/")]
        else:
            folders = [_folder(project, run)]
        if len(folders) > _MOST_FOLDERS:
            found = [place for place in self.places(project) if place.name > after]
        else:
            found = [place for folder in folders for place in self._behind(folder, after, limit)]
        return sorted(found, key=lambda place: place.name)[:limit]

    def read(self, place: Place) -> Capture | None:
        """The capture; None if it is gone, or if another secret encrypted it. Requires `can_keep`."""
        assert self._cipher is not None
        try:
            return Capture.decode(zstandard.decompress(self._cipher.decrypt(self._objects.read(place.key))))
        except (NotFound, InvalidToken):
            return None

    def remove(self, places: Iterable[Place]) -> None:
        self._objects.delete(place.key for place in places)

    def remove_expired(self) -> int:
        """Removes the expired captures of all projects, and returns their number."""
        now = self._now()
        expired = [place for place in self._places(f"{ROOT}/") if place.expires <= now]
        self.remove(expired)
        return len(expired)

    def _behind(self, folder: str, after: str, limit: int) -> list[Place]:
        found: list[Place] = []
        last = folder + after
        while keys := self._objects.page(folder, last, limit):
            found += _parsed(keys)
            if len(keys) < limit or len(found) >= limit:
                break
            last = keys[-1]  # some of these keys are not of captures
        return found

    def _places(self, prefix: str) -> list[Place]:
        return _parsed(self._objects.list(prefix))


def _folder(project: str, run: str) -> str:
    return f"{ROOT}/{project}/{run or _NO_RUN}/"


def _parsed(keys: Iterable[str]) -> list[Place]:
    return [place for key in keys if (place := Place.parse(key))]


def _cipher(secret: str) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(hmac.new(secret.encode(), b"captures", hashlib.sha256).digest()))
