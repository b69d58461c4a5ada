"""Payloads, the encoded content of Ops: in Redis, counted against a budget, or spilled to the object store.

A payload moves only in that direction. Every try writes an object with a unique name, so nothing is ever overwritten.
A try has three steps. It notes the object's name in `spilling`. It writes the object. Then one script replaces the
payload by the object, if the Op still exists and still has that payload.

A name that stays in `spilling` for long belongs to a try that died. The name becomes garbage, and from then on the
script refuses its replacement. Two workers may spill the same payload at once: the later script finds it gone.
"""

from __future__ import annotations

import uuid
from typing import cast

import redis

from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.redis import keys
from app.stores.redis.scripts import Scripts

PREFIX = "payloads"
_GARBAGE_AT_ONCE = 500
# No store continues a write for longer than this.
_ABANDONED_MS = 3_600_000


class RedisPayloads:
    """The encoded content of journalled calls: in Redis, or moved ("spilled") to the object store, one object each.

    `store` is None in a process that runs no Ops and spills nothing.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings, store: ObjectStore | None) -> None:
        self._redis = client
        self._run = Scripts(client, settings)
        self._store = store

    def get(self, request_id: str) -> bytes:
        """The payload of an Op; empty for an Op that has none or is gone. Raises Unavailable (store), NotFound when its
        object was lost."""
        payload = cast("bytes | None", self._redis.get(keys.payload(request_id)))
        if payload is not None:
            return payload
        spilled = cast("bytes | None", self._redis.hget(keys.op(request_id), "spilled"))
        return self._objects.read(spilled.decode()) if spilled else b""

    def due(self, limit: int) -> list[str]:
        """Request ids of the payloads to move now: large ones, and the oldest ones while more than half of the budget
        is used."""
        return [request_id.decode() for request_id in self._run("due_to_spill", limit)]

    def spill(self, request_id: str) -> bool:
        """Moves one payload. Returns False when it was dropped meanwhile. Raises Unavailable; the payload then stays in
        Redis."""
        admitted = cast("bytes | None", self._redis.hget(keys.op(request_id), "admitted"))
        payload = cast("bytes | None", self._redis.get(keys.payload(request_id)))
        if admitted is None or payload is None:
            return False
        key = f"{PREFIX}/{request_id}/{uuid.uuid4().hex}"
        self._run("begin_spill", key)
        self._objects.put_new(key, payload)
        return bool(self._run("spill", request_id, key, admitted))

    def remove_garbage(self) -> int:
        """Deletes objects of dropped payloads, and of moves that never ended. Returns their number. Raises
        Unavailable."""
        garbage = cast(list[bytes], self._run("spill_garbage", _ABANDONED_MS, _GARBAGE_AT_ONCE))
        if garbage:
            self._objects.delete([key.decode() for key in garbage])
            self._redis.srem(keys.SPILL_GARBAGE, *garbage)
        return len(garbage)

    @property
    def _objects(self) -> ObjectStore:
        if self._store is None:
            raise Unavailable("this process was started without an object store to read spilled calls from")
        return self._store
