"""The journal of training Ops on Redis: each change is one script in lua/.

The journal is the truth: one for each model, read by seq. A Celery message only dispatches an Op. It may be lost,
doubled, late or out of order, and nothing in the journal changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from app import ids
from app.domain.limits import FREE, Charge
from app.domain.ops import FORWARD_BACKWARD
from app.domain.progress import Point
from app.domain.results import NOTHING, Result, Usage
from app.errors import BadRequest, Fenced, Gone, NotFound, RequestError, Unavailable
from app.stores.redis import keys, limits
from app.stores.redis.client import flat, read_hash, texts
from app.stores.redis.futures import CONFLICT, RedisFutures
from app.stores.redis.records import dump_point
from app.stores.redis.types import Admission, Entry, Lease, NextOp, OwnedElsewhere, Pending, Record, RefusalKind, Write

ENDED = (
    "this run has ended: it was deleted, or nobody used its session for longer than engine.retain_s; create a new "
    "model, from one of the run's checkpoints if its weights are still needed"
)
_REFUSALS = {
    "unknown": "model {model!r} does not exist",
    "ended": ENDED,
    "failed": "the creation of this model failed, so it takes no calls; create a new model",
    "conflict": CONFLICT,
    "consumed": "seq_id {seq} of this model was used before and cannot be used again; send a call with a higher seq_id",
    "refused": "seq_id {seq} was refused: {reason}",
    "far": "seq_id {seq} leaves more than 1024 earlier seq_ids of this model missing; number the calls of a model 1, "
    "2, 3, ... without leaving any out, and send the missing ones first",
    "changed": "checkpoint {reason!r} was deleted or overwritten just now, or is being deleted; try again soon",
}
_ERRORS: dict[str, type[RequestError]] = {"unknown": NotFound, "ended": Gone, "failed": Gone, "changed": Unavailable}

# The journal holds a reason twice, and once more in each Op that it fails. A client's text in it may have megabytes.
_LONGEST_REASON = 1_000
_RESTORES_S = 3600
# The Ops that a replay reads at once, and the bytes of their content.
_AT_ONCE, _AT_ONCE_BYTES = 32, 4 * 2**20


class _StoredOp(NamedTuple):
    """The fields of a journalled Op, none if it is missing, and the bytes of its content at the state server."""

    seq: int
    request_id: str
    fields: Mapping[bytes, bytes]
    size: int

    @property
    def is_spilled(self) -> bool:
        return b"spilled" in self.fields

    @property
    def has_content(self) -> bool:
        return self.is_spilled or self.size > 0


class RedisOpLog(RedisFutures):
    """Journals and leases, beside the futures; each change is one atomic step.

    Only the next seq of a model (applied + 1) can be committed, once, and only under the newest epoch.
    """

    def create_model(self, model_id: str, fields: Record) -> bool:
        """Registers a model with nothing applied (seq 0 comes first). Returns False if the model exists already."""
        return bool(self._run("create_model", model_id, *flat(fields)))

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
        trace: str = "",
        loads: tuple[str, str] | None = None,
    ) -> Admission:
        """Journals an Op and its pending future. Returns only when it is on disk (the server's appendfsync is always).
        In the same step, `model` are the fields with which to register an unknown model, and `audited` is an entry of
        the audit log. `trace` is the context of its trace. `loads` are the path of the checkpoint that the Op loads and
        the prefix of its files.

        Raises NotFound for an unknown model without these fields, Gone for a model that has ended or whose creation
        failed (unless an admitted Op waits for this one), BadRequest when the seq holds other content, was refused or
        was given up, or leaves too many earlier ones missing, TooLarge for an Op that can never fit,
        UnreplicatedAdmission, and Unavailable while there is no room, or when the checkpoint was deleted or overwritten
        or is being deleted. Unavailable consumes nothing, and is never raised for a repeat; nor while there is no room
        for the Op that others wait for, until the model has had 16 MiB of these. TooManyRequests, when `charge` exceeds
        a rate, consumes nothing, and is never raised for a repeat or for the first part of a batch. LimitReached, when
        `charge` exceeds a total, is never raised for a repeat.
        """
        request_id = ids.request_id(model_id, seq)
        self._check_size(payload)
        call = model_id, seq, request_id, kind, digest
        source = (loads[0], json.dumps(loads[1])) if loads else ("", "")
        more = limits.encoded(charge), audited, trace, *source, *flat(model or {})

        def read(found: Any) -> Admission:
            what, detail = texts(found)
            if what in _REFUSALS:
                text = _REFUSALS[what].format(model=model_id, seq=seq, reason=detail)
                raise _ERRORS.get(what, BadRequest)(text)
            return Admission(request_id, what == "fresh", ids.node_of(detail) if detail else None)

        return self._admit(payload, lambda *content: self._run("admit", *content, *call, *more), read)

    def refuse(self, model_id: str, seq: int, reason: str, kind: RefusalKind = "skip") -> bool:
        """Consumes a seq that will never run.

        Returns False, without a change, when the seq is already taken or leaves too many earlier ones missing, and for
        a model for which `admit` raises Gone. If a gradient is lost thereby (any kind but "skip"), Ops that already
        wait after it, up to and including the next optim_step, fail with `reason`. A long reason is cut.

        Raises Unavailable when the refused call 1024 seqs before still waits for a worker and, unless later Ops wait
        only for this seq, while there is no room. It is consumed when the client sends it again.
        """
        return bool(self._run("refuse", model_id, seq, reason[:_LONGEST_REASON], kind))

    def acquire(self, model_id: str, worker: str) -> Lease | OwnedElsewhere:
        """Takes the lease on the model, unless another live node has it; an earlier process of the same node is
        replaced at once.

        Raises NotFound for an unknown model, Gone for one that has ended.
        """
        found = texts(self._run("acquire", model_id, worker, self._lease_ms))
        if not found:
            raise NotFound(f"model {model_id!r} does not exist")
        if len(found) == 1:
            return OwnedElsewhere(ids.node_of(found[0]))
        if found[0] == "ended":
            raise Gone(ENDED)
        epoch, applied, snapshot, snapshot_seq, floor = found
        return Lease(model_id, worker, int(epoch), int(applied), snapshot, int(snapshot_seq), int(floor))

    def renew(self, ids: Sequence[str], worker: str) -> list[str]:
        """Renews our leases on models and sampling requests.

        Returns the ids whose leases are not ours any more. A worker that does not renew a lease is missing: each Op
        that it began and did not put back counts as a crash of this worker.
        """
        return texts(self._run("renew", worker, self._lease_ms, *ids))

    def claim_node(self, node: str, worker: str, claim: str, over: str = "") -> str:
        """Takes the name of a node for a worker. Returns "", or the claim of another live worker that has the name.
        `claim` is JSON with the worker's name as "worker"; `over` is a claim whose process is known to be over."""
        return str(self._run("claim_node", node, worker, self._lease_ms, claim, over).decode())

    def silent_nodes(self) -> dict[str, str]:
        """The claims of workers that are not heard, by node."""
        found = texts(self._run("silent_nodes"))
        return dict(zip(found[::2], found[1::2], strict=True))

    def forget_node(self, node: str, claim: str) -> bool:
        """Deletes a claim. Returns False when its worker is heard again, or another worker has taken the name."""
        return bool(self._run("forget_node", node, claim))

    def release(self, id_: str, worker: str) -> None:
        """Releases a lease. Does nothing when it is not ours."""
        self._run("release", id_, worker)

    def next(self, lease: Lease, seq: int) -> Entry | None:
        """The Op at `seq`, which is about to run; None when it has not been admitted.

        Raises Fenced. Each other worker that began the Op, did not put it back and is missing counts as an attempt,
        because a crash looks like this. A worker that comes back was cut off, and no longer counts. Raises Unavailable,
        without a change, while the content is in an object store that is away.
        """
        request_id = ids.request_id(lease.model_id, seq)
        begun = lease.model_id, lease.epoch, seq, lease.worker, self._lease_ms
        found, payload = self._start(request_id, lambda content: self._run("next", *begun, content))
        if found == 0:
            raise Fenced(f"{lease.model_id} has an owner newer than epoch {lease.epoch}")
        if not found:
            return None
        kind, doomed, attempts, waited_ms, doubtful, owner, _ = found
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
        """Counts an attempt of an Op that failed in a worker that survived. Does nothing for an older epoch."""
        self._run("leave", lease.model_id, lease.epoch, seq, lease.worker, 1)

    def put_off(self, lease: Lease, seq: int) -> None:
        """Puts an Op back, even if the model has another owner by now: this worker's start does not count as an
        attempt."""
        self._run("leave", lease.model_id, lease.epoch, seq, lease.worker, 0)

    def begin_restore(self, lease: Lease) -> tuple[int, bool]:
        """Begins a restore of the model. Returns the number of restores that ended their worker, as `next` counts
        attempts, and True if one of them is in doubt. The number is forgotten after a restore that succeeds, and an
        hour after the first that did not. Raises Fenced."""
        found = self._run("begin_restore", lease.model_id, lease.epoch, lease.worker, self._lease_ms, _RESTORES_S)
        if found == 0:
            raise Fenced(f"{lease.model_id} has an owner newer than epoch {lease.epoch}")
        return int(found[0]), bool(found[1])

    def end_restore(self, lease: Lease, *, restored: bool = False, broke: bool = False) -> None:
        """Notes that this worker survived the restore of a model, which it `restored` or which `broke` the backend, so
        that this worker ends itself."""
        self._run("end_restore", lease.model_id, lease.worker, int(restored), int(broke))

    def entry(self, model_id: str, seq: int) -> Entry | None:
        """The Op at `seq` for a replay; it only reads. Raises Unavailable, or NotFound when the spilled content is
        lost."""
        request_id = ids.request_id(model_id, seq)
        found = read_hash(self._redis, keys.op(request_id))
        return _entry(seq, request_id, found, self._payloads.get(request_id)) if found else None

    def entries(self, model_id: str, seqs: range) -> list[Entry]:
        """The first of the Ops at these seqs, read together: up to one that is missing or trimmed meanwhile, and at
        most _AT_ONCE Ops, of _AT_ONCE_BYTES of content or one of more. Raises as `entry` does."""
        requests = [ids.request_id(model_id, seq) for seq in seqs[:_AT_ONCE]]
        with self._redis.pipeline() as pipe:  # one step: content may move to the object store meanwhile
            for request_id in requests:
                pipe.hgetall(keys.op(request_id))
                pipe.strlen(keys.payload(request_id))
            read = pipe.execute()
        ops = _handful(map(_StoredOp, seqs, requests, read[::2], read[1::2]))
        contents: list[bytes | None] = [None] * len(ops)  # of a single Op, which may be large, it is read in pieces
        if len(ops) > 1:
            contents = cast("list[bytes | None]", self._redis.mget([keys.payload(op.request_id) for op in ops]))
        entries = []
        for op, content in zip(ops, contents, strict=True):
            payload = self._payloads.get(op.request_id) if op.has_content and content is None else content or b""
            if op.has_content and not payload:
                break
            entries.append(_entry(op.seq, op.request_id, op.fields, payload))
        return entries

    def commit(
        self,
        lease: Lease,
        seq: int,
        result: Result,
        writes: Iterable[Write] = (),
        why: str = "failed",
        usage: Usage = NOTHING,
        point: Point | None = None,
    ) -> None:
        """Makes `seq` the applied one, its result readable and the records set, and wakes the poll.

        Raises Fenced, and Unavailable when pieces of a large result have lapsed. A failed forward_backward makes the
        Ops that already wait after it, up to the next optim_step, fail with `why`; if it was doomed itself, with the
        reason that it has. An Op that did not fail counts its `usage`, in the same step, for the project that the model
        belongs to at that moment. A `point` is added to the model's progress, in the same step.
        """
        state = "failed" if result.failed else "done"
        records = json.dumps([[namespace, key, dict(fields)] for namespace, key, fields in writes])
        body, staged, size = self._staging.place_result(result.body, self._large)
        if not self._run(
            "commit",
            lease.model_id,
            lease.epoch,
            seq,
            state,
            result.content_type,
            body,
            self._unread_s,
            records,
            why,
            json.dumps(dict(usage)),
            staged,
            size,
            dump_point(point) if point else "",
            point.tokens if point and point.kind == FORWARD_BACKWARD else 0,
        ):
            raise Fenced(
                f"{lease.model_id} seq {seq} cannot be committed under epoch {lease.epoch}: another worker owns the "
                "model, or another seq is next"
            )

    def set_snapshot(self, lease: Lease, seq: int, reference: str) -> str:
        """Sets the model's snapshot to a durable one, begins to trim the journal up to it (see `trim`), and returns the
        replaced one.

        A repeat changes nothing and returns `reference` itself. Raises Fenced, and Unavailable while a shared-memory
        transfer at `seq` or before still needs the journal (records.ShmTransfer).
        """
        replaced = self._run("set_snapshot", lease.model_id, lease.epoch, seq, reference)
        if replaced is None:
            raise Fenced(
                f"{lease.model_id} snapshot at seq {seq} cannot be set under epoch {lease.epoch}: another worker owns "
                "the model, or it has a newer snapshot"
            )
        if replaced == 0:
            raise Unavailable(
                f"the journal of {lease.model_id} up to seq {seq} is still needed: only it can rebuild an adapter that "
                "is not uploaded yet"
            )
        return str(replaced.decode())

    def trim(self, model_id: str) -> None:
        """Trims the rest of the model's journal up to its snapshot, in slices: everybody else waits meanwhile."""
        while self._run("trim", model_id):
            pass

    def shortage(self) -> str:
        """The reason why no call is admitted at present; empty while there is room."""
        return str(self._run("room").decode().removeprefix("FULL "))

    def take_calls(self, seconds: float) -> None:
        """Notes that an API process accepts calls, for `seconds` from now."""
        self._run("take_calls", int(seconds * 1000))

    def take_none(self, reason: str, seconds: float) -> None:
        """Has new calls refused for this reason, for `seconds` from now."""
        self._run("take_none", reason, int(seconds * 1000))

    def calls_taken_s(self) -> float:
        """The seconds for which calls have been taken without a break, by the state server's clock. Call it every few
        seconds: time that nobody saw is a break, and so is a clock that jumped."""
        return int(self._run("calls_taken")) / 1000

    def lead(self, role: str, worker: str) -> bool:
        """True while `worker` is the leader for `role`. Call it again well within the lease time."""
        return bool(self._run("lead", role, worker, self._lease_ms))

    def pending(self, limit: int = 1000, start: int = 0, depth: int = 100) -> list[Pending]:
        """Models and requests that are not terminal; the longest without progress come first, throttled ones last.

        Returns `limit` of them from `start`, with at most `depth` kinds each, but none that cannot be read. One call
        reads limit x depth entries, and all other clients of the server wait meanwhile.
        """
        return list(filter(None, map(Pending.read, self._run("pending", start, limit, depth))))

    def count_pending(self) -> int:
        """The number of entries that `pending` reads, with those that cannot be read."""
        return self._redis.zcard(keys.PENDING)

    def sample_queues(self) -> list[str]:
        """The queues to which sampling requests were ever dispatched."""
        return texts(self._redis.hkeys(keys.RUNG_ROWS))

    def holders(self, model_ids: Sequence[str]) -> list[str]:
        """The node of the worker that holds each model in memory; empty without one. A name that is not UTF-8 hides no
        other."""
        found = self._redis.mget([keys.lease(model_id) for model_id in model_ids]) if model_ids else []
        workers = cast("list[bytes | None]", found)
        return [ids.node_of((worker or b"").decode(errors="replace")) for worker in workers]

    def heads(self, seqs: Mapping[str, int]) -> list[NextOp]:
        """The admitted Ops at these seqs, by model id. None of them begins."""
        return _heads(self._run("heads", *(part for place in seqs.items() for part in place)))

    def unowned(self, queue: str, among: int = 1000, page: int = 0) -> list[NextOp]:
        """The next Ops of this queue's models without a live owner; the longest without progress come first.

        Only one page of `among` pending entries is read, because all other clients of the server wait meanwhile. Behind
        the last page with an entry that is not throttled comes the first again.
        """
        return _heads(self._run("unowned", queue, among, page))

    def waiting(self, model_id: str, seq: int, limit: int = 100) -> tuple[str, ...]:
        """The kinds of the waiting Ops from `seq` on, up to a gap."""
        return tuple(texts(self._run("waiting", model_id, seq, limit)))


def _handful(ops: Iterable[_StoredOp]) -> list[_StoredOp]:
    """The first of these Ops, as `RedisOpLog.entries` reads them together."""
    handful: list[_StoredOp] = []
    left = _AT_ONCE_BYTES
    for op in ops:
        # The size of content in the object store is not known: such an Op ends the handful.
        left -= _AT_ONCE_BYTES if op.is_spilled else op.size
        if not op.fields or (handful and left < 0):
            break
        handful.append(op)
    return handful


def _entry(seq: int, request_id: str, op: Mapping[bytes, bytes], payload: bytes) -> Entry:
    doomed = op.get(b"doomed", b"").decode()
    return Entry(seq, op[b"kind"].decode(), request_id, payload, doomed, int(op[b"attempts"]))


def _heads(rows: Sequence[Sequence[Any]]) -> list[NextOp]:
    return [
        NextOp(model_id.decode(), seq, kind.decode(), size, bool(fresh), json.loads(owner))
        for model_id, seq, kind, size, fresh, owner in filter(None, rows)
    ]
