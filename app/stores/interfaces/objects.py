"""Immutable files by key."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class ObjectStore(Protocol):
    """Immutable files by key. A key appears whole or not at all; there is no rename and no append."""

    def put_new(self, key: str, source: Path | bytes) -> bool:
        """Store a file; False (nothing changes) when the key exists."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Give an object a second key, under which nothing else is ever stored, without its bytes passing through here;
        each goes by itself. A repeat changes nothing. Raises NotFound."""
        ...

    def get(self, key: str, target: Path) -> None:
        """Fetch to a local file, whole or not at all. Raises NotFound."""
        ...

    def read(self, key: str) -> bytes:
        """A small object's bytes. Raises NotFound."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Missing keys are fine."""
        ...

    def presign(self, key: str, expires_s: int) -> str:
        """A URL that needs no key and stops working after `expires_s`."""
        ...
