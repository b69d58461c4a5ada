"""Payloads on Redis: the encoded content of calls, and large results, from the first bytes to the object store.

A command of many bytes holds all other clients of the state server. So these bytes go there and come back in pieces.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from typing import NamedTuple, cast

import redis

from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.redis import keys
from app.stores.redis.client import Scripts, texts

# To pass 5 MB to a script took four times as long as to write them to a key.
INLINE_BYTES = 64 * 1024
# One SET of 64 MiB held all other clients for 150 to 400 ms, and the longest of 64 pieces for 7 to 30 ms, on two busy
# cores. Pieces of a quarter took longer in all, since each is written to disk on its own, and held others as long.
PIECE_BYTES = 2**20
_STAGED_S = 600
# What an API process notes that reads results in pieces (`take_calls` in lifecycle.lua).
_PIECES = b"pieces"

_PAYLOADS, _RESULTS = "payloads", "results"
# The hash that refers to an object of each folder, by the request id.
_HOLDERS = {_PAYLOADS: keys.op, _RESULTS: keys.future}
_GARBAGE_AT_ONCE, _MOST_STUCK = 500, 3
# No store continues a write for longer than this.
_ABANDONED_MS = 3_600_000


class Placed(NamedTuple):
    """Bytes as a script takes them: inline, or b"" and the key that holds large ones, and their size."""

    inline: bytes
    key: str
    size: int


class Staging:
    """Bytes on their way to a script, which gets the name of a key instead of the bytes themselves."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def place(self, content: bytes, least: int = INLINE_BYTES) -> Placed:
        """Inline, or with a new key for `least` bytes and more. Nothing is written yet."""
        if len(content) < least:
            return Placed(content, "", len(content))
        return Placed(b"", keys.staged(uuid.uuid4().hex), len(content))

    def place_result(self, body: bytes, least: int) -> Placed:
        """As `place`, with the bytes written already. While the server is full, they stay bytes: what runs must drain,
        and only a script may write then. They also stay bytes for an API process of an earlier version."""
        placed = self.place(body, max(least, PIECE_BYTES))
        if not placed.key:
            return placed
        if not self._reads_pieces():
            return Placed(body, "", len(body))
        try:
            self.write(placed.key, body)
        except redis.OutOfMemoryError:
            return Placed(body, "", len(body))
        return placed

    def _reads_pieces(self) -> bool:
        """True if each API process that lives reads a result that does not lie in its future."""
        last, earlier = self._redis.mget([keys.TAKING_CALLS, keys.EARLIER_API])
        return last in (None, _PIECES) and earlier is None

    def write(self, key: str, content: bytes) -> None:
        """Writes the bytes in pieces. From the first one on, the key expires unless the script that gets it renames it,
        so a process that dies leaves nothing behind. A key that expires between two pieces lacks the first ones: the
        script compares the size."""
        whole = memoryview(content)
        for start in range(0, len(whole), PIECE_BYTES):
            with self._redis.pipeline() as pipe:
                pipe.append(key, whole[start : start + PIECE_BYTES])
                pipe.expire(key, _STAGED_S)
                pipe.execute()

    def read(self, key: str) -> bytes | None:
        """The bytes of a key that is deleted and never changed; None if there is no such key."""
        first = self._piece(key, 0)
        if len(first) < PIECE_BYTES:
            return first or None
        size = self._redis.strlen(key)
        whole = b"".join([first, *(self._piece(key, start) for start in range(PIECE_BYTES, size, PIECE_BYTES))])
        return whole if size and len(whole) == size else None

    def _piece(self, key: str, start: int) -> bytes:
        return cast(bytes, self._redis.getrange(key, start, start + PIECE_BYTES - 1))


class RedisPayloads:
    """Payloads, the encoded content of calls: in Redis, counted against a budget, or moved ("spilled") to the object
    store, one object each; and large results, which move the same way. `store` is None in a process that reads and
    spills nothing.

    A payload moves only in that direction. Every try writes an object with a unique name, so nothing is ever
    overwritten. A try has three steps. It notes the object's name in `spilling`. It writes the object. Then one script
    replaces the payload by the object, if the Op still exists and still has that payload.

    A name that stays in `spilling` for long belongs to a try that died. The name becomes garbage, and from then on the
    script refuses its replacement. Two workers may spill the same payload at once: the later script finds it gone.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings, store: ObjectStore | None) -> None:
        self._redis = client
        self._run = Scripts(client, settings)
        self._store = store
        self._staging = Staging(client)

    def get(self, request_id: str) -> bytes:
        """The payload of an Op; empty for an Op that has none or is gone. Raises Unavailable (store), NotFound when its
        object was lost."""
        payload = self._staging.read(keys.payload(request_id))
        if payload is not None:
            return payload
        spilled = cast("bytes | None", self._redis.hget(keys.op(request_id), "spilled"))
        return self._objects.read(spilled.decode()) if spilled else b""

    def due(self, limit: int) -> list[str]:
        """Request ids of the payloads to move now: large ones, and the oldest ones while more than half of the budget
        is used."""
        return texts(self._run("due_to_spill", limit))

    def spill(self, request_id: str) -> bool:
        """Moves one payload. Returns False when it was dropped meanwhile. Raises Unavailable; the payload then stays in
        Redis."""
        admitted = cast("bytes | None", self._redis.hget(keys.op(request_id), "admitted"))
        payload = self._staging.read(keys.payload(request_id))
        if admitted is None or payload is None:
            return False
        key = f"{_PAYLOADS}/{request_id}/{uuid.uuid4().hex}"
        self._run("begin_spill", key)
        self._objects.put_new(key, payload)
        return bool(self._run("spill", request_id, key, admitted))

    def result(self, request_id: str) -> bytes | None:
        """The body of a result; None when it is not at the state server."""
        body = cast("bytes | None", self._redis.hget(keys.future(request_id), "body"))
        return self._staging.read(keys.result(request_id)) if body is None else body

    def read(self, key: str) -> bytes:
        """The content of an object. Raises Unavailable, NotFound."""
        return self._objects.read(key)

    def due_results(self, limit: int) -> list[str]:
        """Request ids of large results that have to move."""
        return texts(self._run("due_results", limit))

    def spill_result(self, request_id: str) -> bool:
        """Moves one result. Returns False when it expired or moved meanwhile. Raises Unavailable; the result then stays
        in Redis."""
        body = self.result(request_id)
        key = f"{_RESULTS}/{request_id}/{uuid.uuid4().hex}"
        self._run("begin_spill", key)
        if body is not None:
            self._objects.put_new(key, body)
        return bool(self._run("spill_result", request_id, key))

    def forget_results(self, cursor: int, limit: int) -> int:
        """Stops counting expired results: all whose expiry is listed, and those among about `limit` others. Returns the
        cursor for the next call; 0 begins anew."""
        while self._run("forget_expired", limit) == limit:
            pass
        return int(self._run("forget_results", cursor, limit))

    def remove_garbage(self) -> int:
        """Deletes objects of dropped payloads and results, and of moves that never ended. Returns their number. Raises
        Unavailable for one that cannot be deleted, once the others are gone."""
        garbage = cast(list[bytes], self._run("spill_garbage", _ABANDONED_MS, _GARBAGE_AT_ONCE))
        if garbage:
            try:
                self._remove(garbage)
            except Unavailable:
                self._remove_singly(garbage)
        return len(garbage)

    def _remove(self, garbage: Sequence[bytes]) -> None:
        self._objects.delete(texts(garbage))
        self._redis.srem(keys.SPILL_GARBAGE, *garbage)

    def _remove_singly(self, garbage: Sequence[bytes]) -> None:
        """Gives up after a few failures, as the store may be away. The order is random: each key has its turn."""
        failures: list[Unavailable] = []
        for key in random.sample(garbage, len(garbage)):
            try:
                self._remove([key])
            except Unavailable as error:
                failures.append(Unavailable(f"{key.decode()} cannot be deleted: {error}"))
                if len(failures) == _MOST_STUCK:
                    break
        if failures:
            raise failures[0]

    def unknown(self) -> list[str]:
        """The keys of objects that no request and no move knows: their state server was lost, or set back to an earlier
        state. Raises Unavailable."""
        listed = {folder: self._objects.list(f"{folder}/") for folder in _HOLDERS}
        return [key for folder, found in listed.items() for key in found if not self._knows(folder, key)]

    def _knows(self, folder: str, key: str) -> bool:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(_HOLDERS[folder](key.split("/")[1]), "spilled")
            pipe.zscore(keys.SPILLING, key)
            pipe.sismember(keys.SPILL_GARBAGE, key)
            spilled, spilling, is_garbage = pipe.execute()
        return spilled == key.encode() or spilling is not None or bool(is_garbage)

    @property
    def _objects(self) -> ObjectStore:
        if self._store is None:
            raise Unavailable("this process was started without an object store to read spilled calls from")
        return self._store
