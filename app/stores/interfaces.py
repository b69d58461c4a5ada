"""What Tinsmith keeps and where, as interfaces. Every implementation passes the suites in tests/conformance/.

`OpLog` is the truth about training Ops and sampling futures: a journal for each model, read by seq. A Celery message
is only a doorbell; it may be lost, doubled, late or out of order and nothing here changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from app.domain.results import FutureState, Result


@dataclass(frozen=True, slots=True)
class Admission:
    """`fresh` is False for a repeat of what is already journalled. `node` is whom to ring: the model's live owner, or
    the sampler that a request goes to; None for whoever comes first."""

    request_id: str
    fresh: bool
    node: str | None


@dataclass(frozen=True, slots=True)
class Lease:
    """`epoch` grows with every change of owner; a commit with an older one is refused.

    The rest is the model as found: its applied seq, and its newest durable snapshot (empty for none). What was written
    under an epoch before `epoch_floor` belongs to a history that a rebuild left behind.
    """

    model_id: str
    worker: str
    epoch: int
    applied: int
    snapshot: str
    snapshot_seq: int
    epoch_floor: int = 0


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """Another node owns the model."""

    node: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One journalled Op. `doomed` holds the error it fails with instead of running; `attempts` counts the times it was
    begun and broke its worker (of a sampling request: the times it was begun).

    `kind` is an Op's, or a RefusalKind for a consumed seq, whose reason is then in `doomed`.
    """

    seq: int
    kind: str
    request_id: str
    payload: bytes
    doomed: str
    attempts: int
    waited_s: float = 0.0
    """Seconds between admission and this start."""
    adapter: str | None = None
    """Of a sampling request: the prefix of the adapter's version it was admitted for, empty for the base. None for one
    that was admitted before versions were pinned."""


@dataclass(frozen=True, slots=True)
class Future:
    """A future's state for those who see it; `result` when terminal."""

    request_id: str
    kind: str
    model_id: str
    owner: str
    state: FutureState
    result: Result | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A model or sampling request that waits: seconds since it last moved, and the next seq there.

    `kinds`: of what waits from there on without a gap, as many as asked for; empty when the next seq has not come.
    `running`: a live worker began on it. `awaited`: one worker was rung for it, and has not begun or is gone.
    """

    id: str
    queue: str
    waited_s: float
    seq: int | None
    running: bool
    kinds: tuple[str, ...]
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """The Op a model waits with next. `size`: bytes of its content in Redis. `fresh`: no worker began it yet, and it is
    not doomed."""

    model_id: str
    seq: int
    kind: str
    size: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many sampling requests of one queue, and how many tokens of theirs, may be unfinished at once."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampling request that came to its end. `size`: bytes of its result."""

    request_id: str
    failed: bool
    size: int


Record = Mapping[str, str]
RefusalKind = Literal["skip", "lost_batch", "drop_gradients"]
"""What a consumed seq does in its turn: nothing, lose a gradient, or lose one and drop the pending ones."""
Write = tuple[str, str, Record]
"""(namespace, id, fields): a record to set in the same atomic step as a commit."""


class OpLog(Protocol):
    """Journals, futures and leases; each method is one atomic step.

    Only the next seq of a model (applied + 1) can be committed, once, and only under the newest epoch.
    A worker's name is "node/boot": the node is where it can be rung, the boot tells one process from the next.
    """

    def create_model(self, model_id: str, fields: Record) -> bool:
        """Register a model with nothing applied (seq 0 comes first); False if it is there already."""
        ...

    def admit(
        self, model_id: str, seq: int, kind: str, payload: bytes, digest: str, model: Record | None = None
    ) -> Admission:
        """Journal an Op and its pending future. Returns only once it is on disk (the server's appendfsync always).

        `model`: fields to register an unknown model with, in the same step. Raises NotFound for an unknown one without,
        Gone for one that has ended, BadRequest when seq holds other content, was refused, or was given up, and
        TooLarge if it could never fit, and Unavailable while there is no room: that consumes nothing, never hits a
        repeat, and never the Op that others wait for.
        """
        ...

    def refuse(self, model_id: str, seq: int, reason: str, kind: RefusalKind = "skip") -> bool:
        """Consume a seq that will never run. If that loses a gradient (any kind but "skip"), Ops already waiting behind
        it, up to and including the next optim_step, fail with `reason`. False (and nothing changes) when the seq is
        already taken."""
        ...

    def acquire(self, model_id: str, worker: str) -> Lease | HeldElsewhere:
        """Own the model, unless another live node does; an earlier process of the same node is replaced at once.

        Raises NotFound for an unknown model, Gone for one that has ended.
        """
        ...

    def renew(self, ids: Sequence[str], worker: str) -> list[str]:
        """Extend the leases on models and sampling requests that are still ours; returns the ids that are not."""
        ...

    def release(self, id_: str, worker: str) -> None:
        """Give a lease up; a no-op when it is not ours."""
        ...

    def next(self, lease: Lease, seq: int) -> Entry | None:
        """The Op at `seq`, which is about to run; None when it has not been admitted. Raises Fenced.

        One more attempt counts when another worker boot left it running, which is what a crash looks like.
        Raises Unavailable, and changes nothing, while its content is in an object store that is away.
        """
        ...

    def strike(self, lease: Lease, seq: int) -> None:
        """Count an attempt at an Op that did not come to an end though its worker lives. Nothing for an older epoch."""
        ...

    def put_off(self, lease: Lease, seq: int) -> None:
        """Leave an Op for later: whoever runs it next counts no attempt. Nothing for an older epoch."""
        ...

    def entry(self, model_id: str, seq: int) -> Entry | None:
        """The Op at `seq` for a replay: read only. Raises Unavailable, or NotFound when its spilled content is lost."""
        ...

    def commit(self, lease: Lease, seq: int, result: Result, writes: Iterable[Write] = (), why: str = "failed") -> None:
        """Make `seq` the applied one, its result readable and the records set, and wake the poll. Raises Fenced.

        A forward_backward that failed dooms, with `why`, what already waits behind it up to the next optim_step.
        """
        ...

    def set_snapshot(self, lease: Lease, seq: int, reference: str) -> str:
        """Point at a durable snapshot, trim the journal behind it, return the one replaced. Raises Fenced, and
        Unavailable while a hand-over at `seq` or before still needs the journal (see records.Handover).

        A repeat changes nothing and returns `reference` itself.
        """
        ...

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
    ) -> Admission:
        """A sampling future: deduplicated like an Op, but in no order. `tokens`: the most it may take, prompt and all.

        Its adapter's version is fixed here: its sampler's, or the newest of the model that this one follows. It goes
        where that was sampled before (of the base: for this sampler) while there is room in the batch, then where there
        is more (records.Worker), and while everybody holds all he can to whoever comes first. Raises
        BadRequest on other content and for what `bounds` could never let in, TooLarge, TooManyRequests while the queue
        is full, and Unavailable while there is no room. All but the first never hit a repeat.
        """
        ...

    def claim_sample(self, request_id: str, worker: str, most_attempts: int | None = None) -> Entry | None:
        """Start on a sampling request; None when it is terminal. It counts at this worker now, which becomes its
        adapter's home if there is none, or one that was rung and did not take it. Raises Fenced while another worker
        runs it, TriedOften if it had more than `most_attempts`, and Unavailable, changing nothing, while its content is
        in an object store that is away."""
        ...

    def put_off_sample(self, request_id: str, worker: str) -> None:
        """Let go of a sampling request that could not be run for no fault of its own; a no-op when it is not ours."""
        ...

    def finish_sample(self, request_id: str, result: Result) -> bool:
        """Make the result readable and wake the poll; False when there already was one (it stays)."""
        ...

    def cancel_sample(self, request_id: str) -> bool:
        """Fail a sampling request ("user") that nobody waits for, and tell whoever runs it; False when there was a
        result already (it stays)."""
        ...

    def outcome(self, request_id: str) -> Result | None:
        """A terminal future's result, for a worker; None while it is pending or when it is gone."""
        ...

    def future(self, request_id: str, owners: Set[str]) -> Future:
        """`owners` are the projects it may be of. Raises NotFound for an unknown or foreign id (alike), Gone for an
        expired one."""
        ...

    def shortage(self) -> str:
        """Why no call is taken in at present; empty while there is room."""
        ...

    def take_calls(self, seconds: float) -> None:
        """An API process is there to take calls in, for so long from now."""
        ...

    def takes_calls(self) -> bool:
        """Whether any is."""
        ...

    def lead(self, role: str, worker: str) -> bool:
        """True while `worker` is the one that does `role` for everybody; call again well within the lease time."""
        ...

    def pending(self, limit: int = 1000, start: int = 0, depth: int = 100) -> list[Pending]:
        """What is not terminal, longest without progress first: `limit` of them from `start`, at most `depth` kinds
        of each. One call looks at limit x depth entries while everybody else waits for the server."""
        ...

    def heads(self, seqs: Mapping[str, int]) -> list[Head]:
        """The Ops at these seqs, by model id, that have been admitted; none of them begins."""
        ...

    def waiting(self, model_id: str, seq: int, limit: int = 100) -> tuple[str, ...]:
        """The kinds of the Ops from `seq` on, up to a gap."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose future is still kept; unix times in seconds by the state server's clock, `ended` None while it has
    not."""

    request_id: str
    kind: str
    state: FutureState
    admitted: float
    ended: float | None


class Calls(Protocol):
    """What was called and when, as far as it is still known."""

    def of_model(self, model_id: str) -> list[Call]:
        """By seq, the newest 10,000."""
        ...

    def of_sampler(self, sampler_id: str) -> list[Call]:
        """Those that run, or whose results nobody has read, by id; the newest 10,000 of each client."""
        ...


class Completions(Protocol):
    """Which sampling requests came to their end, in that order, by poll target (app/ids.py)."""

    def since(self, target: str, cursor: int) -> tuple[list[Completion], int]:
        """Those behind `cursor` (0: all) whose results nobody read, oldest first, a slice at most; and the cursor to
        go on from. What is not behind `cursor` is forgotten."""
        ...

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Their results were fetched and may go soon; those of unfinished or unknown requests are left alone."""
        ...


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


class Records(Protocol):
    """Small flat records by namespace and id: sessions, sampling sessions, checkpoints, workers."""

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None: ...

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        """False when there is one already (it stays). Raises Unavailable while there is no room for another."""
        ...

    def put_newer(self, namespace: str, key: str, version: int, fields: Record) -> bool:
        """Set a record with a field `version`; False (nothing changes) when that version or a later one is there."""
        ...

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        """Set fields of a record; False when there is none (none is made)."""
        ...

    def get(self, namespace: str, key: str) -> dict[str, str] | None: ...

    def delete(self, namespace: str, key: str) -> None: ...

    def delete_same(self, namespace: str, key: str, fields: Record) -> bool:
        """Delete a record that still says what was read of it; False when it has changed since."""
        ...

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Those whose id starts with `prefix`, by id, read a slice at a time."""
        ...

    def join(self, sampler_id: str) -> int:
        """The number of one more client of a sampling session, from 1 on. Raises NotFound for an unknown one."""
        ...

    def now(self) -> float:
        """Unix time in seconds by the server's clock, the only one that decides what has expired."""
        ...


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a model is in memory: the node that holds its lease, empty for none. `full`: see records.Model."""

    base_model: str
    node: str
    full: bool = False


class Lifecycle(Protocol):
    """When sessions, models and files come to their end. Every time is the state server's own.

    A session is heard of by a heartbeat, or by an Op of one of its models or samplers. It ends when it is finished or
    was not heard of for `engine.session_s`; an Op brings it back, and a heartbeat too unless it was finished.
    """

    def heartbeat(self, session_id: str) -> None:
        """Its client is still there."""
        ...

    def finish(self, session_id: str, reason: str) -> None:
        """Its client is done; the first reason stays as its status."""
        ...

    def move(self, session_id: str, project: str) -> None:
        """Its owner, and that of all that is in it or is being saved there, is another project from now on. One that is
        gone is left alone."""
        ...

    def expire(self) -> list[str]:
        """End the silent sessions; returns their ids."""
        ...

    def retired(self) -> list[str]:
        """Sessions that ended `engine.retain_s` ago or earlier."""
        ...

    def forget(self, session_id: str) -> bool:
        """Remove the record of a retired session; False (nothing changes) for one that is not retired any more."""
        ...

    def end_model(self, model_id: str, *, retired: bool = False) -> Holder | None:
        """End a model for good, in one step: whoever holds it is fenced, its journal and its snapshot pointer go, its
        waiting Ops fail ("user"), and later ones and owners get Gone. Again for an ended one changes nothing.

        None for an unknown model; with `retired`, also (and nothing changes) when its session is not retired any more.
        """
        ...

    def unload(self, model_id: str) -> None:
        """Its client needs it in memory no more, until the next Op. Nothing for an unknown model."""
        ...

    def end_sampler(self, sampler_id: str) -> bool:
        """Remove a sampler's record; False (and nothing changes) when its session is not retired any more."""
        ...

    def abort_samples(self) -> int:
        """Fail ("user") the unfinished requests of samplers that are gone, or whose session has ended; how many."""
        ...

    def holders(self, model_ids: Iterable[str]) -> list[Holder]:
        """Where these models are in memory now."""
        ...

    def unwanted(self, model_ids: Iterable[str]) -> set[str]:
        """Of these, those that were ended or are unknown; and of those with nothing to do the unloaded ones, and the
        ones whose session has ended."""
        ...

    def loads(self, model_id: str) -> list[int]:
        """The seqs in its journal that read a checkpoint when they run or are replayed."""
        ...

    def overdue(self, unreferenced: Iterable[str]) -> list[str]:
        """Note what nobody refers to now; returns what was in every such note for `engine.orphan_s`."""
        ...


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
