"""The journal of training Ops and sampling requests on Redis: each method is one script in lua/, or one read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
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
    RequestError,
    TooLarge,
    TooManyRequests,
    TriedOften,
    Unavailable,
)
from app.settings import EngineSettings
from app.stores.interfaces.journal import (
    Admission,
    Entry,
    Future,
    Head,
    HeldElsewhere,
    Lease,
    Pending,
    QueueBounds,
    RefusalKind,
)
from app.stores.interfaces.records import Record, Write
from app.stores.objects.base import ObjectStore
from app.stores.redis import keys, limits
from app.stores.redis.client import read_hash
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.scripts import Scripts

ENDED = (
    "this run has ended: it was deleted, or nobody used its session for longer than engine.retain_s; create a new "
    "model, from one of the run's checkpoints if its weights are still needed"
)
_REFUSALS = {
    "conflict": "seq_id {seq} was used before with other content; every call needs a seq_id of its own",
    "consumed": "seq_id {seq} is already behind this model and can not be used again",
    "refused": "seq_id {seq} was refused: {reason}",
}

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
CANCELLED = "cancelled: its client asked for that"

_STAGED_BYTES = 64 * 1024
_STAGED_S = 600
# Results up to this size stay for all of result_read_s; if the SDK asks again, it does so within seconds.
_READ_BYTES = 64 * 1024
_READ_LEAST_S = 300


class RedisOpLog:
    """See app.stores.interfaces.OpLog."""

    def __init__(self, client: redis.Redis, settings: EngineSettings, store: ObjectStore | None = None) -> None:
        """`store` holds the spilled payloads; a process that runs no Ops needs no store."""
        self._redis = client
        self._run = Scripts(client, settings)
        self._payloads = RedisPayloads(client, settings, store)
        self._lease_ms = int(settings.lease_s * 1000)
        self._unread_s = settings.result_unread_s
        self._read_s = settings.result_read_s
        self._budget = settings.payload_budget_bytes

    def create_model(self, model_id: str, fields: Record) -> bool:
        return bool(self._run("create_model", model_id, *_flat(fields)))

    def admit(
        self,
        model_id: str,
        seq: int,
        kind: str,
        payload: bytes,
        digest: str,
        model: Record | None = None,
        charge: Charge = FREE,
        audited: str = "",
    ) -> Admission:
        request_id = ids.request_id(model_id, seq)
        self._check_size(payload)
        staged = self._stage(payload)
        inline = b"" if staged else payload
        more = limits.of_op(charge), audited, *_flat(model or {})
        found = self._run("admit", model_id, seq, request_id, kind, inline, digest, staged, *more)
        limits.check(found)
        what, detail = _texts(found)
        if what == "unknown":
            raise NotFound(f"no model {model_id!r}")
        if what == "ended":
            raise Gone(ENDED)
        if what in _REFUSALS:
            raise BadRequest(_REFUSALS[what].format(seq=seq, reason=detail))
        return Admission(request_id, what == "fresh", _node(detail) if detail else None)

    def refuse(self, model_id: str, seq: int, reason: str, kind: RefusalKind = "skip") -> bool:
        return bool(self._run("refuse", model_id, seq, reason, kind))

    def acquire(self, model_id: str, worker: str) -> Lease | HeldElsewhere:
        found = _texts(self._run("acquire", model_id, worker, self._lease_ms))
        if not found:
            raise NotFound(f"no model {model_id!r}")
        if len(found) == 1:
            return HeldElsewhere(_node(found[0]))
        if found[0] == "ended":
            raise Gone(ENDED)
        epoch, applied, snapshot, snapshot_seq, floor = found
        return Lease(model_id, worker, int(epoch), int(applied), snapshot, int(snapshot_seq), int(floor))

    def renew(self, ids: Sequence[str], worker: str) -> list[str]:
        return _texts(self._run("renew", worker, self._lease_ms, *ids))

    def release(self, id_: str, worker: str) -> None:
        self._run("release", id_, worker)

    def next(self, lease: Lease, seq: int) -> Entry | None:
        request_id = ids.request_id(lease.model_id, seq)
        payload = self._to_run(request_id)
        found = self._run("next", lease.model_id, lease.epoch, seq, lease.worker, self._lease_ms)
        if found == 0:
            raise Fenced(f"{lease.model_id} has an owner newer than epoch {lease.epoch}")
        if not found:
            return None
        kind, doomed, attempts, waited_ms, doubtful, owner = found
        # The Op may have been admitted, or its payload spilled, since the first read.
        payload = payload or self._to_run(request_id)
        return Entry(
            seq,
            kind.decode(),
            request_id,
            payload,
            doomed.decode(),
            attempts,
            waited_ms / 1000,
            in_doubt=bool(doubtful),
            owner=json.loads(owner),
        )

    def strike(self, lease: Lease, seq: int) -> None:
        self._run("leave", lease.model_id, lease.epoch, seq, lease.worker, 1)

    def put_off(self, lease: Lease, seq: int) -> None:
        self._run("leave", lease.model_id, lease.epoch, seq, lease.worker, 0)

    def entry(self, model_id: str, seq: int) -> Entry | None:
        request_id = ids.request_id(model_id, seq)
        found = read_hash(self._redis, keys.op(request_id))
        if not found:
            return None
        kind, doomed = found[b"kind"].decode(), found.get(b"doomed", b"").decode()
        return Entry(seq, kind, request_id, self._payloads.get(request_id), doomed, int(found[b"attempts"]))

    def commit(
        self,
        lease: Lease,
        seq: int,
        result: Result,
        writes: Iterable[Write] = (),
        why: str = "failed",
        usage: Usage = NOTHING,
    ) -> None:
        state = "failed" if result.failed else "done"
        records = json.dumps([[namespace, key, dict(fields)] for namespace, key, fields in writes])
        if not self._run(
            "commit",
            lease.model_id,
            lease.epoch,
            seq,
            state,
            result.content_type,
            result.body,
            self._unread_s,
            records,
            why,
            json.dumps(dict(usage)),
        ):
            raise Fenced(f"{lease.model_id} seq {seq} is not for epoch {lease.epoch} to commit")

    def set_snapshot(self, lease: Lease, seq: int, reference: str) -> str:
        replaced = self._run("set_snapshot", lease.model_id, lease.epoch, seq, reference)
        if replaced is None:
            raise Fenced(f"{lease.model_id} snapshot at seq {seq} is not for epoch {lease.epoch} to set")
        if replaced == 0:
            raise Unavailable(f"{lease.model_id} handed over what only its journal up to seq {seq} can make again")
        return str(replaced.decode())

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
            raise BadRequest(_REFUSALS[what].format(seq=request_id.rpartition(":")[2]))
        if bounds and what in _FULL_QUEUE:
            error, text = _FULL_QUEUE[what]
            raise error(text.format(queue=queue, held=held, tokens=tokens, bounds=bounds))
        fresh = what in ("fresh", "held")
        return Admission(request_id, fresh, held.decode() or None if fresh else None, held=what == "held")

    def release_samples(self, queue: str, last: Sequence[str] = ()) -> list[tuple[str, str | None]]:
        rows = self._run("release_samples", queue, *last)
        return [(request_id.decode(), node.decode() or None) for request_id, node in rows]

    def claim_sample(self, request_id: str, worker: str, most_attempts: int | None = None) -> Entry | None:
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
        self._run("put_off_sample", request_id, worker, took)

    def finish_sample(self, request_id: str, result: Result, usage: Usage = NOTHING) -> bool:
        state, used = "failed" if result.failed else "done", json.dumps(dict(usage))
        answer = result.content_type, result.body
        return bool(self._run("finish_sample", request_id, state, *answer, self._unread_s, used))

    def cancel_sample(self, request_id: str) -> bool:
        failed = Result.failure(CANCELLED)
        return bool(self._run("cancel_sample", request_id, self._unread_s, failed.content_type, failed.body))

    def outcome(self, request_id: str) -> Result | None:
        found = read_hash(self._redis, keys.future(request_id))
        return _result(found) if found.get(b"state") in (b"done", b"failed") else None

    def future(self, request_id: str, owners: Set[str], onlookers: Set[str] = frozenset()) -> Future:
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
                # A poll for all requests of a client reads a result only after the completion was reported to it.
                pipe.zrem(keys.completed(ids.target_of(request_id)), request_id)
            pipe.execute()

    def _kept_s(self, size: int) -> int:
        """The seconds that a result of `size` bytes stays once read; a larger one goes sooner, as memory is bounded."""
        return min(self._read_s, max(_READ_LEAST_S, self._read_s * _READ_BYTES // max(size, 1)))

    def shortage(self) -> str:
        return str(self._run("room").decode().removeprefix("FULL "))

    def take_calls(self, seconds: float) -> None:
        self._redis.set(keys.TAKING_CALLS, "", px=int(seconds * 1000))

    def takes_calls(self) -> bool:
        return bool(self._redis.exists(keys.TAKING_CALLS))

    def lead(self, role: str, worker: str) -> bool:
        return bool(self._run("lead", role, worker, self._lease_ms))

    def pending(self, limit: int = 1000, start: int = 0, depth: int = 100) -> list[Pending]:
        rows = self._run("pending", start, limit, depth)
        return [
            Pending(
                id=id_.decode(),
                queue=queue.decode(),
                waited_s=float(ms) / 1000,
                seq=int(seq) if seq else None,
                kinds=tuple(kind.decode() for kind in kinds),
                running=bool(running),
                awaited=bool(awaited),
                held=bool(held),
            )
            for id_, queue, ms, seq, running, kinds, awaited, held in rows
        ]

    def heads(self, seqs: Mapping[str, int]) -> list[Head]:
        return _heads(self._run("heads", *(part for place in seqs.items() for part in place)))

    def unowned(self, queue: str, among: int = 1000) -> list[Head]:
        return _heads(self._run("unowned", queue, among))

    def waiting(self, model_id: str, seq: int, limit: int = 100) -> tuple[str, ...]:
        return tuple(_texts(self._run("waiting", model_id, seq, limit)))

    def _check_size(self, payload: bytes) -> None:
        """Raises TooLarge for a payload over the budget: a retry of it could never succeed."""
        if len(payload) > self._budget:
            raise TooLarge(
                f"the call takes {len(payload)} bytes, over engine.payload_budget_bytes ({self._budget}): split it"
            )

    def _stage(self, payload: bytes) -> str:
        """Stores a large payload and returns its key; "" for a small one.

        To pass 5 MB to a script took four times as long as a plain SET.
        """
        if len(payload) < _STAGED_BYTES:
            return ""
        key = keys.staged(uuid.uuid4().hex)
        self._redis.set(key, payload, ex=_STAGED_S)
        return key

    def _to_run(self, request_id: str) -> bytes:
        """A call's content. It is read before the start is noted: an object store that is away must not use an attempt.

        Lost content is empty. Each run then fails, and after the last attempt the Op fails.
        """
        try:
            return self._payloads.get(request_id)
        except NotFound:
            return b""

    def _absence(self, request_id: str, owners: Set[str]) -> NotFound | Gone:
        """The error for a missing future.

        An id whose parent is the caller's existed once: Gone. Every other id looks unknown: NotFound.
        """
        parent, _, seq = request_id.rpartition(":")
        for namespace in ("models", "samplers"):
            stored, applied = self._redis.hmget(keys.record(namespace, parent), ["owner", "applied"])
            if stored is not None and json.loads(stored) in owners and (applied is None or int(seq) <= int(applied)):
                return Gone(f"the result of {request_id!r} has expired")
        return NotFound(f"no future {request_id!r}")


def _flat(fields: Record) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def _texts(found: Sequence[bytes]) -> list[str]:
    return [part.decode() for part in found]


def _heads(rows: Sequence[Sequence[Any]]) -> list[Head]:
    return [
        Head(model_id.decode(), seq, kind.decode(), size, bool(fresh), json.loads(owner))
        for model_id, seq, kind, size, fresh, owner in filter(None, rows)
    ]


def _node(worker: str) -> str:
    return worker.rpartition("/")[0]


def _result(found: dict[bytes, bytes]) -> Result:
    return Result(found[b"body"], found[b"type"].decode(), found[b"state"] == b"failed")
