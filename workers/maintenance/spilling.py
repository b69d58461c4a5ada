"""Spilling: moves payloads and results from the state server to the object store."""

from __future__ import annotations

import logging
from collections.abc import Callable

from app.stores.redis.payloads import RedisPayloads

log = logging.getLogger(__name__)
# One batch in each round: between two rounds the lead may pass to another worker.
_BATCH = 64

Move = tuple[Callable[[str], bool], str]
"""A function that moves a payload or a result to the object store, and the request id that it gets."""


class PayloadSpilling:
    """Moves payloads and results to the object store. While it is away nothing moves, and nothing is lost."""

    def __init__(self, payloads: RedisPayloads) -> None:
        self._payloads, self._cursor = payloads, 0
        self._failed: set[Move] = set()
        """The moves that failed when they were last tried."""

    def sweep(self) -> None:
        """Runs one round. Raises Unavailable."""
        self._cursor = self._payloads.forget_results(self._cursor, _BATCH)
        try:
            self._move()
        finally:
            self._payloads.remove_garbage()  # last: an object that cannot be deleted keeps nothing from moving

    def _move(self) -> None:
        """Moves what is due, until a move fails. Those that failed before come last, so a few that cannot be moved keep
        no other."""
        due: list[Move] = [(self._payloads.spill, request_id) for request_id in self._payloads.due(_BATCH)]
        due += [(self._payloads.spill_result, request_id) for request_id in self._payloads.due_results(_BATCH)]
        self._failed.intersection_update(due)
        moved = 0
        for move in sorted(due, key=self._failed.__contains__):
            self._failed.add(move)  # and stays there if the move raises
            spill, request_id = move
            moved += spill(request_id)
            self._failed.remove(move)
        if moved:
            log.info("moved %d payloads and results to the object store", moved)
