"""The truth about training Ops and sampling futures: a journal for each model, read by seq.

A Celery message is only a doorbell; it may be lost, doubled, late or out of order and nothing here changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol

from app.domain.limits import FREE, Charge
from app.domain.results import NOTHING, FutureState, Result, Usage
from app.stores.interfaces.records import Record, Write


@dataclass(frozen=True, slots=True)
class Admission:
    """`fresh` is False for a repeat of what is already journalled. `node` is whom to ring: the model's live owner, or
    the sampler that a request goes to; None for whoever comes first. Nobody is to be rung for one that is `held`."""

    request_id: str
    fresh: bool
    node: str | None
    held: bool = False


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
    """One journalled Op. `doomed` holds the error it fails with instead of running; `attempts` counts the workers
    that began it and were broken by it, or died.

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
    in_doubt: bool = False
    """One of the attempts is of a worker on another node that was missed for less than a lease: it may be cut off."""
    owner: str = ""
    """Of an Op that is about to run: the project its model is of."""


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
    `running`: a live worker began on it. `awaited`: one worker was rung for it, and has not begun or is gone. `held`:
    nobody is to be rung for it yet.
    """

    id: str
    queue: str
    waited_s: float
    seq: int | None
    running: bool
    kinds: tuple[str, ...]
    awaited: bool = False
    held: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """The Op a model waits with next. `size`: bytes of its content in Redis. `fresh`: no worker began it yet, and it is
    not doomed. `owner`: the model's project."""

    model_id: str
    seq: int
    kind: str
    size: int
    fresh: bool
    owner: str


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many sampling requests of one queue, and how many tokens of theirs, may be unfinished at once."""

    requests: int
    tokens: int


RefusalKind = Literal["skip", "lost_batch", "drop_gradients"]
"""What a consumed seq does in its turn: nothing, lose a gradient, or lose one and drop the pending ones."""


class OpLog(Protocol):
    """Journals, futures and leases; each method is one atomic step.

    Only the next seq of a model (applied + 1) can be committed, once, and only under the newest epoch.
    A worker's name is "node/boot": the node is where it can be rung, the boot tells one process from the next.
    """

    def create_model(self, model_id: str, fields: Record) -> bool:
        """Register a model with nothing applied (seq 0 comes first); False if it is there already."""
        ...

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
        Raises NotFound for an unknown one without, Gone for one that has ended, BadRequest when seq holds other
        content, was refused, or was given up, and TooLarge if it could never fit, and Unavailable while there is no
        room: that consumes nothing, never hits a repeat, and never the Op that others wait for. The same holds for the
        TooManyRequests of a rate that `charge` is over; where it is over what there may be, LimitReached, which spares
        only repeats.
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
        """Extend the leases on models and sampling requests that are still ours; returns the ids that are not.

        A worker that does not call it for a lease is missed: what it has begun, and did not leave, it died of.
        """
        ...

    def release(self, id_: str, worker: str) -> None:
        """Give a lease up; a no-op when it is not ours."""
        ...

    def next(self, lease: Lease, seq: int) -> Entry | None:
        """The Op at `seq`, which is about to run; None when it has not been admitted. Raises Fenced.

        Each other worker that began it, did not leave it and is not heard of counts as an attempt: that is what a crash
        looks like. Should it be heard of again, it was cut off, and counts no longer.
        Raises Unavailable, and changes nothing, while its content is in an object store that is away.
        """
        ...

    def strike(self, lease: Lease, seq: int) -> None:
        """Count an attempt at an Op that did not come to an end though its worker lives. None for an older epoch."""
        ...

    def put_off(self, lease: Lease, seq: int) -> None:
        """Leave an Op, whoever owns its model by now: that this worker began it is no attempt."""
        ...

    def entry(self, model_id: str, seq: int) -> Entry | None:
        """The Op at `seq` for a replay: read only. Raises Unavailable, or NotFound when its spilled content is lost."""
        ...

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

        A forward_backward that failed dooms, with `why`, what already waits behind it up to the next optim_step. What
        did not fail counts its `usage`, in the same step, for whose the model is then.
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
        charge: Charge = FREE,
    ) -> Admission:
        """A sampling future: deduplicated like an Op, but in no order. `tokens`: the most it may take, prompt and all.

        Its adapter's version is fixed here: its sampler's, or the newest of the model that this one follows. It goes
        where that was sampled before (of the base: for this sampler) while there is room in the batch, then where there
        is more (records.Worker), and while everybody holds all he can to whoever comes first. Raises
        BadRequest on other content and for what `bounds` could never let in, NotFound where the sampler is gone,
        TooLarge, TooManyRequests while the queue is full or a limit of `charge` is reached, and Unavailable while there
        is no room. All but the first never hit a repeat.

        It is held where its owner has others held, or has enough under way: all owners together three batches of the
        queue's samplers, or this one its part of a batch.
        """
        ...

    def release_samples(self, queue: str, last: Sequence[str] = ()) -> list[tuple[str, str | None]]:
        """The held requests there is room for now, each with the node to ring; they are held no more. One of each owner
        at a time, those of `last` behind the others and in that order."""
        ...

    def claim_sample(self, request_id: str, worker: str, most_attempts: int | None = None) -> Entry | None:
        """Start on a sampling request; None when it is terminal. It counts at this worker now, which becomes its
        adapter's home if there is none, or one that was rung and did not take it. Raises Fenced while another worker
        runs it, TriedOften if it had more than `most_attempts`, and Unavailable, changing nothing, while its content is
        in an object store that is away."""
        ...

    def put_off_sample(self, request_id: str, worker: str, took: int = 0) -> None:
        """Leave a sampling request that could not be run for no fault of its own; somebody else's stays his. One that
        was called off while `worker` ran it is charged for the tokens it `took`, and no more for what it might have."""
        ...

    def finish_sample(self, request_id: str, result: Result, usage: Usage = NOTHING) -> bool:
        """Make the result readable and wake the poll; False when there already was one (it stays). What did not fail
        counts its `usage`, in the same step."""
        ...

    def cancel_sample(self, request_id: str) -> bool:
        """Fail a sampling request ("user") that nobody waits for, and tell whoever runs it; False when there was a
        result already (it stays)."""
        ...

    def outcome(self, request_id: str) -> Result | None:
        """A terminal future's result, for a worker; None while it is pending or when it is gone."""
        ...

    def future(self, request_id: str, owners: Set[str], onlookers: Set[str] = frozenset()) -> Future:
        """`owners` are the projects it may be of; a result of one of the `onlookers` among them is not noted as read,
        by which it would go sooner. Raises NotFound for an unknown or foreign id (alike), Gone for an expired one."""
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
        """What is not terminal, longest without progress first and what is held last: `limit` of them from `start`, at
        most `depth` kinds of each. One call looks at limit x depth entries while everybody else waits."""
        ...

    def heads(self, seqs: Mapping[str, int]) -> list[Head]:
        """The Ops at these seqs, by model id, that have been admitted; none of them begins."""
        ...

    def unowned(self, queue: str, among: int = 1000) -> list[Head]:
        """The next Ops of this queue's models that no live worker owns, longest without progress first; looked for in
        the first `among` of all that is pending, while everybody else waits for the server."""
        ...

    def waiting(self, model_id: str, seq: int, limit: int = 100) -> tuple[str, ...]:
        """The kinds of the Ops from `seq` on, up to a gap."""
        ...
