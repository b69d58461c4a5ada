"""Captured answers in the object store, `captures/<project>/<day>/<run>/<us>@<number>`, each encrypted.

The day is that of the state server's clock. Without the secret nobody can read the files, neither in the store nor in a
backup of it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zstandard
from cryptography.fernet import Fernet, InvalidToken

from app.domain.captures import Capture
from app.errors import NotFound
from app.stores.objects.base import ObjectStore

ROOT = "captures"
DAY_S = 86_400
_NO_RUN = "-"
"""Stands for the run in a key, where a base model was sampled."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a capture is. `run` is empty for a base model. `name` sorts by time."""

    project: str
    day: int
    run: str
    name: str

    @property
    def key(self) -> str:
        return f"{ROOT}/{self.project}/{self.day}/{self.run or _NO_RUN}/{self.name}"

    @classmethod
    def of(cls, key: str) -> Place:
        _, project, day, run, name = key.split("/")
        return cls(project, int(day), "" if run == _NO_RUN else run, name)


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

    def add(self, project: str, run: str, capture: Capture) -> None:
        """Stores a capture. Requires `can_keep`."""
        assert self._cipher is not None
        name = f"{int(capture.created * 1e6):017d}@{uuid.uuid4().hex}"
        content = self._cipher.encrypt(zstandard.compress(capture.encode()))
        self._objects.put_new(Place(project, int(capture.created) // DAY_S, run, name).key, content)

    def places(self, project: str = "") -> list[Place]:
        """All captures of a project, or of all projects, oldest first."""
        prefix = f"{ROOT}/{project}/" if project else f"{ROOT}/"
        return sorted(map(Place.of, self._objects.list(prefix)), key=lambda place: place.name)

    def read(self, places: Iterator[Place] | list[Place]) -> Iterator[Capture]:
        """The captures at these places that are still there and that this secret encrypted."""
        for place in places:
            try:
                content = self._objects.read(place.key)
            except NotFound:
                continue
            if self._cipher is not None:
                yield from _decrypted(self._cipher, content)

    def remove(self, places: list[Place]) -> None:
        self._objects.delete(place.key for place in places)

    def today(self) -> int:
        return int(self._now()) // DAY_S


def _cipher(secret: str) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(hmac.new(secret.encode(), b"captures", hashlib.sha256).digest()))


def _decrypted(cipher: Fernet, content: bytes) -> Iterator[Capture]:
    try:
        yield Capture.decode(zstandard.decompress(cipher.decrypt(content)))
    except InvalidToken:  # the operator has another secret now
        return
