"""The content of journalled calls."""

from __future__ import annotations

from typing import Protocol


class Payloads(Protocol):
    """The encoded content of journalled calls: in Redis, or moved ("spilled") to the object store, one object each."""

    def get(self, request_id: str) -> bytes:
        """Empty for an Op that has none or is gone. Raises Unavailable (store), NotFound when its object was lost."""
        ...

    def due(self, limit: int) -> list[str]:
        """Request ids whose payload should move now: large ones, and the oldest while over half the budget is used."""
        ...

    def spill(self, request_id: str) -> bool:
        """Move one; False when it was dropped meanwhile. Raises Unavailable, and it then stays where it is."""
        ...

    def remove_garbage(self) -> int:
        """Delete objects of dropped payloads, and of moves that never ended; how many. Raises Unavailable."""
        ...
