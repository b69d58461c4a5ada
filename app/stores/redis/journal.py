"""The journal of training Ops on Redis: each method is one script in lua/, or one read.

The journal is the truth: one for each model, read by seq. A Celery message only dispatches an Op. It may be lost,
doubled, late or out of order, and nothing in the journal changes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app import ids
from app.domain.limits import FREE, Charge
from app.domain.results import NOTHING, Result, Usage
from app.errors import BadRequest, Fenced, Gone, NotFound, Unavailable
from app.stores.redis import keys, limits
from app.stores.redis.client import read_hash
from app.stores.redis.futures import CONFLICT, RedisFutures
from app.stores.redis.types import (
    Admission,
    Entry,
    Head,
    HeldElsewhere,
    Lease,
    Pending,
    Record,
    RefusalKind,
    Write,
)

ENDED = (
    "this run has ended: it was deleted, or nobody used its session for longer than engine.retain_s; create a new "
    "model, from one of the run's checkpoints if its weights are still needed"
)
_REFUSALS = {
    "conflict": CONFLICT,
    "consumed": "seq_id {seq} is already behind this model and can not be used again",
    "refused": "seq_id {seq} was refused: {reason}",
}

_STAGED_BYTES = 64 * 1024
_STAGED_S = 600


class RedisOpLog(RedisFutures):
    """Journals and leases, beside the futures; each method is one atomic step.

    Only the next seq of a model (applied + 1) can be committed, once, and only under the newest epoch.
    """

    def create_model(self, model_id: str, fields: Record) -> bool:
        """Register a model with nothing applied (seq 0 comes first); False if it is there already."""
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
        """Journal an Op and its pending future. Returns only once it is on disk (the server's appendfsync always).

        In the same step, `model`: fields to register an unknown model with; `audited`: an entry of the audit log.
        Raises NotFound for an unknown model without these, Gone for one that has ended, BadRequest when seq holds other
        content, was refused, or was given up, TooLarge if it could never fit, and Unavailable while there is no room:
        that consumes nothing, never hits a repeat, and never the Op that others wait for. The same holds for the
        TooManyRequests of a rate that `charge` exceeds. A total that it exceeds raises LimitReached, which spares only
        repeats.
        """
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
        """Consume a seq that will never run; False (and nothing changes) when the seq is already taken.

        If that loses a gradient (any kind but "skip"), Ops already waiting behind it, up to and including the next
        optim_step, fail with `reason`.
        """
        return bool(self._run("refuse", model_id, seq, reason, kind))

    def acquire(self, model_id: str, worker: str) -> Lease | HeldElsewhere:
        """Own the model, unless another live node does; an earlier process of the same node is replaced at once.

        Raises NotFound for an unknown model, Gone for one that has ended.
        """
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
        """Extend the leases on models and sampling requests that are still ours; returns the ids that are not.

        A worker that does not call it for a lease is missed: each Op that it began and did not leave counts as one that
        killed it.
        """
        return _texts(self._run("renew", worker, self._lease_ms, *ids))

    def release(self, id_: str, worker: str) -> None:
        """Give a lease up; a no-op when it is not ours."""
        self._run("release", id_, worker)

    def next(self, lease: Lease, seq: int) -> Entry | None:
        """The Op at `seq`, which is about to run; None when it has not been admitted. Raises Fenced.

        Each other worker that began it, did not leave it and is not heard of counts as an attempt: a crash looks like
        that. One that is heard of again was cut off, and counts no longer.
        Raises Unavailable, and changes nothing, while its content is in an object store that is away.
        """
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
        """Count an attempt at an Op that did not come to an end though its worker lives; nothing for an older epoch."""
        self._run("leave", lease.model_id, lease.epoch, seq, lease.worker, 1)

    def put_off(self, lease: Lease, seq: int) -> None:
        """Leave an Op, whoever owns its model by now: this worker's start is no attempt."""
        self._run("leave", lease.model_id, lease.epoch, seq, lease.worker, 0)

    def entry(self, model_id: str, seq: int) -> Entry | None:
        """The Op at `seq` for a replay: read only. Raises Unavailable, or NotFound when its spilled content is lost."""
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
        """Make `seq` the applied one, its result readable and the records set, and wake the poll. Raises Fenced.

        A forward_backward that failed dooms, with `why`, the Ops that already wait behind it up to the next optim_step.
        An Op that did not fail counts its `usage` for the model's project of that moment, in the same step.
        """
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
        """Point at a durable snapshot, trim the journal behind it, return the one replaced. A repeat changes nothing
        and returns `reference` itself.

        Raises Fenced, and Unavailable while a hand-over at `seq` or before still needs the journal (records.Handover).
        """
        replaced = self._run("set_snapshot", lease.model_id, lease.epoch, seq, reference)
        if replaced is None:
            raise Fenced(f"{lease.model_id} snapshot at seq {seq} is not for epoch {lease.epoch} to set")
        if replaced == 0:
            raise Unavailable(f"{lease.model_id} handed over what only its journal up to seq {seq} can make again")
        return str(replaced.decode())

    def shortage(self) -> str:
        """The reason why no call is taken in at present; empty while there is room."""
        return str(self._run("room").decode().removeprefix("FULL "))

    def take_calls(self, seconds: float) -> None:
        """An API process is there to take calls in, for so long from now."""
        self._redis.set(keys.TAKING_CALLS, "", px=int(seconds * 1000))

    def takes_calls(self) -> bool:
        """True if any API process accepts calls."""
        return bool(self._redis.exists(keys.TAKING_CALLS))

    def lead(self, role: str, worker: str) -> bool:
        """True while `worker` is the one that does `role` for everybody; call again well within the lease time."""
        return bool(self._run("lead", role, worker, self._lease_ms))

    def pending(self, limit: int = 1000, start: int = 0, depth: int = 100) -> list[Pending]:
        """Models and requests that are not terminal, longest without progress first and held ones last.

        Returns `limit` of them from `start`, with at most `depth` kinds each. One call looks at limit x depth entries
        while everybody else waits.
        """
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
        """The Ops at these seqs, by model id, that have been admitted; none of them begins."""
        return _heads(self._run("heads", *(part for place in seqs.items() for part in place)))

    def unowned(self, queue: str, among: int = 1000) -> list[Head]:
        """The next Ops of this queue's models that no live worker owns, longest without progress first.

        It looks among the first `among` of all that is pending, while everybody else waits for the server.
        """
        return _heads(self._run("unowned", queue, among))

    def waiting(self, model_id: str, seq: int, limit: int = 100) -> tuple[str, ...]:
        """The kinds of the Ops from `seq` on, up to a gap."""
        return tuple(_texts(self._run("waiting", model_id, seq, limit)))

    def _stage(self, payload: bytes) -> str:
        """Stores a large payload and returns its key; "" for a small one.

        To pass 5 MB to a script took four times as long as a plain SET.
        """
        if len(payload) < _STAGED_BYTES:
            return ""
        key = keys.staged(uuid.uuid4().hex)
        self._redis.set(key, payload, ex=_STAGED_S)
        return key


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
