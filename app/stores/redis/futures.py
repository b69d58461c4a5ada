"""Futures on Redis: sampling requests, and the results of these and of Ops.

Each method is one script in lua/, or one read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import cast

import redis

from app import ids
from app.domain.limits import FREE, Charge
from app.domain.results import NOTHING, FutureState, Result, Usage
from app.errors import (
    BadRequest,
    Fenced,
    Gone,
    NotFound,
    RequestError,
    TooLarge,
    TooManyRequests,
    TriedOften,
)
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.redis import keys, limits
from app.stores.redis.client import read_hash
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.scripts import Scripts
from app.stores.redis.types import Admission, Entry, Future, QueueBounds

CONFLICT = "seq_id {seq} was used before with other content; every call needs a seq_id of its own"
CANCELLED = "cancelled: its client asked for that"

_FULL_QUEUE: dict[str, tuple[type[RequestError], str]] = {
    "too_large": (
        BadRequest,
        "the request may take {tokens} tokens (prompt + num_samples * max_tokens), over the base model's "
        "sampler.queue_tokens ({bounds.tokens}): ask for fewer samples or tokens",
    ),
    "requests": (
        TooManyRequests,
        "{held} requests wait or run on {queue}, and the base model's sampler.queue_requests lets in "
        "{bounds.requests}; try again soon",
    ),
    "tokens": (
        TooManyRequests,
        "requests for {held} tokens wait or run on {queue}; with the {tokens} of this one they would be over the base "
        "model's sampler.queue_tokens ({bounds.tokens}); try again soon",
    ),
}

# Results up to this size stay the whole of result_read_s; the SDK asks again within seconds, if it does.
_READ_BYTES = 64 * 1024
_READ_LEAST_S = 300


class RedisFutures:
    """Sampling requests, and the futures of these and of Ops; each method is one atomic step.

    A worker's name is "node/boot": the node is where calls are dispatched to, the boot tells one process from the next.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings, store: ObjectStore | None = None) -> None:
        """`store` holds the spilled payloads; a process that runs no Ops needs none."""
        self._redis = client
        self._run = Scripts(client, settings)
        self._payloads = RedisPayloads(client, settings, store)
        self._lease_ms = int(settings.lease_s * 1000)
        self._unread_s = settings.result_unread_s
        self._read_s = settings.result_read_s
        self._budget = settings.payload_budget_bytes

    def admit_sample(
        self,
        request_id: str,
        parent_id: str,
        owner: str,
        queue: str,
        payload: bytes,
        digest: str,
        tokens: int = 0,
        bounds: QueueBounds | None = None,
        sequences: int = 1,
        charge: Charge = FREE,
    ) -> Admission:
        """Journal a sampling request and its future: deduplicated like an Op, but in no order.

        `tokens`: the most it may take, prompt and all. `sequences`: the number of samples.
        The version of its adapter is fixed here: its sampler's, or the newest of the model that this sampler follows.
        It goes where that was sampled before (of the base: for this sampler) while there is room in the batch, then
        where there is more (records.Worker), and to whoever comes first while every sampler holds all it can.
        Raises BadRequest on other content and for a request that `bounds` could never let in, NotFound where the
        sampler is gone, TooLarge, TooManyRequests while the queue is full or a limit of `charge` is reached, and
        Unavailable while there is no room. All but the first never hit a repeat.

        It is held where its owner has others held, or has enough under way: all owners together three batches of the
        queue's samplers, or this one its part of a batch.
        """
        self._check_size(payload)
        most = (bounds.requests, bounds.tokens) if bounds else ("", "")
        needed = tokens, sequences
        paid = limits.of_sample(charge)
        found = self._run("admit_sample", request_id, parent_id, owner, queue, payload, digest, *needed, *most, *paid)
        limits.check(found)
        what, held = found[0].decode(), found[1]
        if what == "unknown":
            raise NotFound(f"sampler {parent_id[:200]!r} does not exist")
        if what == "conflict":
            raise BadRequest(CONFLICT.format(seq=request_id.rpartition(":")[2]))
        if bounds and what in _FULL_QUEUE:
            error, text = _FULL_QUEUE[what]
            raise error(text.format(queue=queue, held=held, tokens=tokens, bounds=bounds))
        fresh = what in ("fresh", "held")
        return Admission(request_id, fresh, held.decode() or None if fresh else None, held=what == "held")

    def release_samples(self, queue: str, last: Sequence[str] = ()) -> list[tuple[str, str | None]]:
        """Release the held requests that there is room for now; returns each with the node to ring.

        One of each owner goes at a time, those of `last` behind the others and in that order.
        """
        rows = self._run("release_samples", queue, *last)
        return [(request_id.decode(), node.decode() or None) for request_id, node in rows]

    def claim_sample(self, request_id: str, worker: str, most_attempts: int | None = None) -> Entry | None:
        """Start on a sampling request; None when it is terminal.

        It counts at this worker now, which becomes its adapter's home if there is none, or one that was rung and did
        not take it. Raises Fenced while another worker runs it, TriedOften if it had more than `most_attempts`, and
        Unavailable, changing nothing, while its content is in an object store that is away.
        """
        payload = self._to_run(request_id)
        most = "" if most_attempts is None else most_attempts
        found = self._run("claim_sample", request_id, worker, self._lease_ms, most)
        if found == 0:
            raise Fenced(f"{request_id} runs on another worker")
        if found == 1:
            raise TriedOften(f"{request_id} had more than {most_attempts} attempts")
        if not found:
            return None
        payload = payload or self._to_run(request_id)
        attempts, doubtful, waited_ms, adapter = found
        pinned = None if adapter is None else adapter.decode()
        return Entry(0, "sample", request_id, payload, "", attempts, waited_ms / 1000, pinned, bool(doubtful))

    def put_off_sample(self, request_id: str, worker: str, took: int = 0) -> None:
        """Leave a sampling request that could not be run for no fault of its own; another worker's stays as it is.

        A request that was cancelled while `worker` ran it is charged for the tokens it `took` instead of the most it
        might have taken.
        """
        self._run("put_off_sample", request_id, worker, took)

    def finish_sample(self, request_id: str, result: Result, usage: Usage = NOTHING) -> bool:
        """Make the result readable and wake the poll; False when there already was one (it stays).

        A request that did not fail counts its `usage`, in the same step.
        """
        state, used = "failed" if result.failed else "done", json.dumps(dict(usage))
        answer = result.content_type, result.body
        return bool(self._run("finish_sample", request_id, state, *answer, self._unread_s, used))

    def cancel_sample(self, request_id: str) -> bool:
        """Fail ("user") a sampling request that nobody waits for, and tell the worker that runs it; False when there
        was a result already (it stays)."""
        failed = Result.failure(CANCELLED)
        return bool(self._run("cancel_sample", request_id, self._unread_s, failed.content_type, failed.body))

    def outcome(self, request_id: str) -> Result | None:
        """A terminal future's result, for a worker; None while it is pending or when it is gone."""
        found = read_hash(self._redis, keys.future(request_id))
        return _result(found) if found.get(b"state") in (b"done", b"failed") else None

    def future(self, request_id: str, owners: Set[str], onlookers: Set[str] = frozenset()) -> Future:
        """A future of one of the projects `owners`.

        A result of one of the `onlookers` among them is not noted as read, and so does not go sooner. Raises NotFound
        for an unknown or foreign id (alike), Gone for an expired one.
        """
        found = read_hash(self._redis, keys.future(request_id))
        if b"state" not in found:
            raise self._absence(request_id, owners)
        owner = found[b"owner"].decode()
        if owner not in owners:
            raise NotFound(f"no future {request_id!r}")
        state = cast(FutureState, found[b"state"].decode())
        result = None if state == "pending" else _result(found)
        kind = found[b"kind"].decode()
        if result is not None and owner not in onlookers:
            self._note_read(request_id, kind, len(result.body))
        return Future(request_id, kind, found[b"model"].decode(), owner, state, result)

    def _note_read(self, request_id: str, kind: str, size: int) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.expire(keys.future(request_id), self._kept_s(size), lt=True)
            if kind == "sample":
                # Whoever waits for all of a client's requests together reads a result only once told that it is there.
                pipe.zrem(keys.completed(ids.target_of(request_id)), request_id)
            pipe.execute()

    def _kept_s(self, size: int) -> int:
        """The time for which a result of this size stays after it was read: the larger, the shorter, because memory is
        bounded."""
        return min(self._read_s, max(_READ_LEAST_S, self._read_s * _READ_BYTES // max(size, 1)))

    def _check_size(self, payload: bytes) -> None:
        """Raises TooLarge for a call that can never fit, so that its client does not retry."""
        if len(payload) > self._budget:
            raise TooLarge(
                f"the call takes {len(payload)} bytes, over engine.payload_budget_bytes ({self._budget}): split it"
            )

    def _to_run(self, request_id: str) -> bytes:
        """A call's content, read before its start is noted: an object store that is away must not count as a try.

        Lost content is empty, so that running it fails, and after its attempts the Op.
        """
        try:
            return self._payloads.get(request_id)
        except NotFound:
            return b""

    def _absence(self, request_id: str, owners: Set[str]) -> NotFound | Gone:
        """An id whose parent is the caller's was there once; anything else looks unknown."""
        parent, _, seq = request_id.rpartition(":")
        for namespace in ("models", "samplers"):
            stored, applied = self._redis.hmget(keys.record(namespace, parent), ["owner", "applied"])
            if stored is not None and json.loads(stored) in owners and (applied is None or int(seq) <= int(applied)):
                return Gone(f"the result of {request_id!r} has expired")
        return NotFound(f"no future {request_id!r}")


def _result(found: dict[bytes, bytes]) -> Result:
    return Result(found[b"body"], found[b"type"].decode(), found[b"state"] == b"failed")
