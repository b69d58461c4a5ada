"""Futures on Redis: sampling requests, the results of these and of Ops, and the payloads of both.

Each change is one script in lua/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import redis

from app import ids
from app.domain.limits import FREE, Charge
from app.domain.results import NOTHING, FutureState, Result, Usage
from app.errors import (
    BadRequest,
    Fenced,
    Gone,
    NotFound,
    NotReplicated,
    RequestError,
    TooLarge,
    TooManyRequests,
    TriedOften,
    Unavailable,
)
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.objects.routes import LONGEST_S, Attempt, StoredRoutes
from app.stores.redis import keys, limits
from app.stores.redis.client import Scripts, read_hash
from app.stores.redis.payloads import INLINE_BYTES, RedisPayloads, Staging
from app.stores.redis.types import Admission, Entry, Future, QueueBounds, UnreplicatedAdmission

CONFLICT = "seq_id {seq} was used before with other content; every call needs a seq_id of its own"
GIVEN_UP = (
    "the weights of sampler {sampler!r} were deleted: of a run's saves without a path, the newest {most} stay, and "
    "those used within {hours:g} hours; save the weights again, with a path if they should last"
)
CANCELLED = "cancelled: its client asked for that"

_FULL_QUEUE: dict[str, tuple[type[RequestError], str]] = {
    "too_large": (
        BadRequest,
        "the request may take {tokens} tokens (prompt + num_samples * max_tokens), over the base model's "
        "sampler.queue_tokens ({bounds.tokens}): ask for fewer samples or tokens",
    ),
    "requests": (
        TooManyRequests,
        "{held} requests wait or run on {queue}, and the base model's sampler.queue_requests allows "
        "{bounds.requests}; try again soon",
    ),
    "tokens": (
        TooManyRequests,
        "requests for {held} tokens wait or run on {queue}; with the {tokens} of this one they would be over the base "
        "model's sampler.queue_tokens ({bounds.tokens}); try again soon",
    ),
}

# Reply of a script that would admit the call, but needs its bytes first.
_ABSENT = b"absent"
# Replies of a script that has journaled the call in this step.
_FRESH = (b"fresh", b"held")
# Reply of a script that starts the call only once its content has been read.
_READ_FIRST = b"read"

# Results up to this size stay the whole of result_read_s; the SDK asks again within seconds, if it does.
_READ_BYTES = 64 * 1024
_READ_LEAST_S = 300


class RedisFutures:
    """Sampling requests, and the futures of these and of Ops; each method is one atomic step.

    A worker's name is "node/boot": the node is where calls are dispatched to, the boot tells one process from the next.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings, store: ObjectStore | None = None) -> None:
        """`store` holds the spilled payloads and results; a process that neither runs Ops nor answers polls does not
        need it."""
        self._redis = client
        self._run = Scripts(client, settings)
        self._payloads = RedisPayloads(client, settings, store)
        self._staging = Staging(client)
        self._lease_ms = int(settings.lease_s * 1000)
        self._unread_s = settings.result_unread_s
        self._read_s = settings.result_read_s
        self._budget = settings.payload_budget_bytes
        self._adapters, self._adapter_s = settings.ephemeral_adapters, settings.ephemeral_s
        self._large = settings.result_spill_bytes

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
        trace: str = "",
    ) -> Admission:
        """Journals a sampling request and its future: deduplicated like an Op, but in no order. `tokens`: the most
        tokens it may take, including the prompt. `sequences`: the number of samples. `trace`: the context of its trace.

        The version of its adapter is fixed here: the version of its sampler, or the newest version of the model that
        this sampler follows. The request goes to the worker that sampled this version before (for the base model: that
        ran requests of this sampler before) while that worker has room in its batch, then to the one with more room
        (records.Worker). While every sampler is full, it goes to the first one with room.

        Raises BadRequest for other content and for a request that `bounds` can never admit, NotFound when the sampler
        or its adapter is gone, TooLarge, TooManyRequests while the queue is full or a limit of `charge` is reached, and
        Unavailable while there is no room. A repeat can only raise the first of these. Raises UnreplicatedAdmission for
        a request that was journaled now, but that too few replicas have.

        The request is throttled if its owner has throttled requests, or if `may_dispatch` (lua/dispatch.lua) finds no
        room: three batches of the queue's samplers are dispatched, beyond them up to twice as many while the owner
        stays within its equal part of three. An owner without a dispatched request always has room.
        """
        self._check_size(payload)
        most = (bounds.requests, bounds.tokens) if bounds else ("", "")
        needed = tokens, sequences
        paid = limits.encoded_with_payers(charge)
        call = request_id, parent_id, owner, queue, digest, *needed, *most, *paid, trace

        def read(found: Any) -> Admission:
            what, held = found[0].decode(), found[1]
            if what == "unknown":
                raise NotFound(f"sampler {parent_id[:200]!r} does not exist")
            if what == "given_up":
                hours = self._adapter_s / 3600
                raise NotFound(GIVEN_UP.format(sampler=parent_id[:200], most=self._adapters, hours=hours))
            if what == "conflict":
                raise BadRequest(CONFLICT.format(seq=ids.seq_of(request_id)))
            if bounds and what in _FULL_QUEUE:
                error, text = _FULL_QUEUE[what]
                raise error(text.format(queue=queue, held=held, tokens=tokens, bounds=bounds))
            fresh = found[0] in _FRESH
            return Admission(request_id, fresh, held.decode() or None if fresh else None, throttled=what == "held")

        return self._admit(payload, lambda *content: self._run("admit_sample", *content, *call), read)

    def release_samples(self, queue: str, last: Sequence[str] = ()) -> list[tuple[str, str | None]]:
        """Releases the throttled requests for which there is room now.

        Returns each with the node to dispatch it to. One request of each owner is released at a time; the owners in
        `last` come after the others, in that order.
        """
        rows = self._run("release_samples", queue, *last)
        return [(request_id.decode(), node.decode() or None) for request_id, node in rows]

    def claim_sample(self, request_id: str, worker: str, most_attempts: int | None = None) -> Entry | None:
        """Starts an attempt of a sampling request.

        Returns None when the request is terminal. From now on it counts at this worker. The worker becomes the affinity
        of its adapter if there is none, or if the one that it was dispatched to has not begun it. Raises Fenced while
        another worker runs it or it is paused, TriedOften if it had more than `most_attempts`, and Unavailable, without
        a change, while its content is in an object store that is away.
        """
        begun = request_id, worker, self._lease_ms, "" if most_attempts is None else most_attempts
        found, payload = self._start(request_id, lambda content: self._run("claim_sample", *begun, content))
        if found == 0:
            raise Fenced(f"{request_id} runs on another worker")
        if found == 1:
            raise TriedOften(f"{request_id} had more than {most_attempts} attempts")
        if not found:
            return None
        attempts, doubtful, waited_ms, adapter, _ = found
        pinned = None if adapter is None else adapter.decode()
        return Entry(0, "sample", request_id, payload, "", attempts, waited_ms / 1000, pinned, bool(doubtful))

    def put_off_sample(self, request_id: str, worker: str, usage: Usage = NOTHING) -> None:
        """Puts back a sampling request that could not be run for no fault of its own.

        A request of another worker does not change. If the request was cancelled while `worker` ran it, its `usage` is
        counted, once, and it is charged for these tokens instead of the most it might have taken.
        """
        self._run("put_off_sample", request_id, worker, json.dumps(dict(usage)))

    def finish_sample(
        self, request_id: str, result: Result, usage: Usage = NOTHING, routes: StoredRoutes | None = None
    ) -> bool:
        """Makes the result readable and wakes the poll.

        Returns False when there is a result already; that one stays. A request that did not fail counts its `usage` in
        the same step. `routes` become those of the request, and count for its payers.
        """
        state, used = "failed" if result.failed else "done", json.dumps(dict(usage))
        answer = result.content_type, *self._staging.place_result(result.body, self._large)
        kept = () if routes is None else (routes.attempt.day, routes.attempt.id, routes.size, LONGEST_S)
        return bool(self._run("finish_sample", request_id, state, *answer, self._unread_s, used, *kept))

    def routes_of(self, request_id: str) -> Attempt | None:
        """The attempt whose routes are those of a sampling request; None without routes."""
        found = cast("bytes | None", self._redis.get(keys.routes(request_id)))
        day, _, id_ = (found or b"").decode().partition("/")
        return Attempt(int(day), id_) if found else None

    def forget_routes(self, before: int) -> None:
        """Stops counting the bytes of the routes of the days before this one."""
        self._run("forget_routes", before)

    def cancel_sample(self, request_id: str) -> bool:
        """Fails ("user") a sampling request that nobody waits for, and notifies the worker that runs it. Returns False
        when there is a result already; that one stays."""
        failed = Result.failure(CANCELLED)
        return bool(self._run("cancel_sample", request_id, self._unread_s, failed.content_type, failed.body))

    def outcome(self, request_id: str) -> Result | None:
        """The result of a terminal future, for a worker; None while the future is pending or when it is gone.

        A worker only asks whether it failed. So a body that has moved to the object store is empty here.
        """
        found = read_hash(self._redis, keys.future(request_id))
        if found.get(b"state") not in (b"done", b"failed"):
            return None
        return Result(found.get(b"body", b""), found[b"type"].decode(), found[b"state"] == b"failed")

    def digest(self, request_id: str) -> str | None:
        """The digest with which a call was admitted; None when there is no such future. Raises NotReplicated."""
        found = cast("bytes | None", self._run.confirmed("HGET", keys.future(request_id), "digest"))
        return None if found is None else found.decode()

    def future(self, request_id: str, owners: Set[str], onlookers: Set[str] = frozenset()) -> Future:
        """A future of one of the projects `owners`.

        If the project is also in `onlookers`, its result is not noted as read, so that it does not expire earlier.
        Raises NotFound for an unknown and for a foreign id (with the same text), Gone for an expired one, and
        Unavailable while its result is in an object store that is away. That store is also away if it lacks the result,
        since a folder that is not mounted is empty: a client that got Gone would never ask again. Raises NotReplicated
        for a result that a failover could still lose.
        """
        # The result is read only for its owner: the time of a foreign poll would show its size.
        fields = self._redis.hmget(keys.future(request_id), ["state", "owner", "kind", "model", "trace"])
        state, owner, kind, model, trace = (
            field.decode() if field else "" for field in cast("list[bytes | None]", fields)
        )
        if not state or owner not in owners:
            absence = self._absence(request_id, owners)  # also for a foreign id: it costs the same reads
            raise NotFound(f"future {request_id!r} does not exist") if state else absence
        result = None if state == "pending" else self._result(request_id, owners)
        if result is not None and owner not in onlookers:
            self._note_read(request_id, kind, len(result.body))
        return Future(request_id, kind, model, owner, cast(FutureState, state), result, trace)

    def trace_of(self, request_id: str) -> str:
        """The context of a future's trace; empty for none."""
        found = cast("bytes | None", self._redis.hget(keys.future(request_id), "trace"))
        return (found or b"").decode()

    def _result(self, request_id: str, owners: Set[str]) -> Result:
        """The result of a terminal future. Replicas that must have it get what is read: it is the same connection."""
        found = cast(dict[bytes, bytes], self._run.confirmed("HGETALL", keys.future(request_id)))
        if b"type" not in found:
            raise self._absence(request_id, owners)
        body = found.get(b"body")
        if body is None and b"spilled" not in found:
            body = self._payloads.result(request_id)
        if body is None:
            body = self._spilled_result(request_id)
        return Result(body, found[b"type"].decode(), found[b"state"] == b"failed")

    def _spilled_result(self, request_id: str) -> bytes:
        spilled = cast("bytes | None", self._redis.hget(keys.future(request_id), "spilled"))
        if spilled is None:
            raise Unavailable(f"the result of {request_id!r} is about to expire; run the call again")
        try:
            return self._payloads.read(spilled.decode())
        except NotFound:
            raise Unavailable(
                f"the object store does not have the result of {request_id!r}: check that its folder is mounted here, "
                "and is the one that the workers use"
            ) from None

    def _note_read(self, request_id: str, kind: str, size: int) -> None:
        is_large = size >= self._large
        if is_large:
            self._run("note_read", self._kept_s(size), request_id)
        with self._redis.pipeline(transaction=False) as pipe:
            if not is_large:
                # XX: a sampling request that was admitted again meanwhile has no expiry yet, and must not get one.
                pipe.expire(keys.future(request_id), self._kept_s(size), xx=True, lt=True)
            if kind == "sample":
                # A client that polls for all of its requests reads a result only after a poll has named it.
                pipe.zrem(keys.completed(ids.target_of(request_id)), request_id)
            pipe.execute()

    def _kept_s(self, size: int) -> int:
        """The time for which a result of this size stays after it was read: the larger, the shorter, because memory is
        bounded."""
        return min(self._read_s, max(_READ_LEAST_S, self._read_s * _READ_BYTES // max(size, 1)))

    def _admit(
        self, payload: bytes, run: Callable[[bytes, str, int], Any], read: Callable[[Any], Admission]
    ) -> Admission:
        """Runs a script that admits a call, with (its bytes, the key of large ones, their size), and reads its reply.
        Large bytes are only written once the script has no reason to refuse the call, or to answer it without them: a
        refused client repeats its call, and the append-only file would fill the disk. Raises Unavailable,
        UnreplicatedAdmission, and what `limits.check` and `read` do."""
        content = self._staging.place(payload)
        try:
            found = run(*content)
            if found[0] == _ABSENT:
                self._staging.write(content.key, payload)
                found = run(*content)
        except NotReplicated as error:
            if error.reply and error.reply[0] in _FRESH:
                raise UnreplicatedAdmission(str(error), read(error.reply)) from None
            raise
        if found[0] == _ABSENT:
            raise Unavailable("the call took so long that its stored content has expired; try again soon")
        limits.check(found)
        return read(found)

    def _check_size(self, payload: bytes) -> None:
        """Raises TooLarge for a call that can never fit, so that its client does not retry."""
        if len(payload) > self._budget:
            raise TooLarge(
                f"the call takes {len(payload)} bytes, over engine.payload_budget_bytes ({self._budget}): split it"
            )

    def _start(self, request_id: str, start: Callable[[int | str], Any]) -> tuple[Any, bytes]:
        """The reply of a script that starts a call, and the call's content. `start(most)` runs the script, which brings
        along a content of at most these bytes; '' if none is wanted.

        Other content is read before the start is noted: an object store that is away must not count as an attempt. Lost
        content is returned empty, so that the attempt fails, and after the last attempt the Op.
        """
        found = start(INLINE_BYTES)
        if found != _READ_FIRST:
            return found, found[-1] if isinstance(found, list) and found else b""
        try:
            payload = self._payloads.get(request_id)
        except NotFound:
            payload = b""
        return start(""), payload

    def _absence(self, request_id: str, owners: Set[str]) -> NotFound | Gone:
        """Gone for an id whose parent belongs to the caller, because it existed once; NotFound for any other id."""
        parent = ids.parent_of(request_id)
        for namespace in ("models", "samplers"):
            stored, applied = self._redis.hmget(keys.record(namespace, parent), ["owner", "applied"])
            is_own = stored is not None and json.loads(stored) in owners
            if is_own and (applied is None or ids.seq_of(request_id) <= int(applied)):
                return Gone(f"the result of {request_id!r} has expired")
        return NotFound(f"future {request_id!r} does not exist")
