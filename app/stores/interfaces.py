"""What Tinsmith keeps and where, as interfaces. Every implementation passes the suites in tests/conformance/.

`OpLog` is the truth about training Ops and sampling futures: a journal for each model, read by seq. A Celery message
is only a doorbell; it may be lost, doubled, late or out of order and nothing here changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from app.domain.results import FutureState, Result


@dataclass(frozen=True, slots=True)
class Admission:
    """`fresh` is False for a repeat of what is already journalled. `node` is the model's live owner, if any."""

    request_id: str
    fresh: bool
    node: str | None


@dataclass(frozen=True, slots=True)
class Lease:
    """`epoch` grows with every change of owner; a commit with an older one is refused.

    The rest is the model as found: its applied seq, and its newest durable snapshot (empty for none).
    """

    model_id: str
    worker: str
    epoch: int
    applied: int
    snapshot: str
    snapshot_seq: int


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """Another node owns the model."""

    node: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One journalled Op. `doomed` holds the error it fails with instead of running; `attempts` counts starts.

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


@dataclass(frozen=True, slots=True)
class Future:
    """A future's state for its owner; `result` when terminal."""

    request_id: str
    kind: str
    model_id: str
    state: FutureState
    result: Result | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A model or sampling request that waits: seconds since it last moved, and the next seq there.

    `kinds`: of what waits from there on without a gap, at most 100; empty when the next seq itself has not come.
    `running`: a live worker began on it.
    """

    id: str
    queue: str
    waited_s: float
    seq: int | None
    running: bool
    kinds: tuple[str, ...]


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

    def admit(self, model_id: str, seq: int, kind: str, payload: bytes, digest: str) -> Admission:
        """Journal an Op and its pending future. Returns only once it is on disk (the server's appendfsync always).

        Raises NotFound for an unknown model, BadRequest when seq holds other content, was refused, or was given up.
        """
        ...

    def refuse(self, model_id: str, seq: int, reason: str, kind: RefusalKind = "skip") -> bool:
        """Consume a seq that will never run. If that loses a gradient (any kind but "skip"), Ops already waiting behind
        it, up to and including the next optim_step, fail with `reason`. False (and nothing changes) when the seq is
        already taken."""
        ...

    def acquire(self, model_id: str, worker: str) -> Lease | HeldElsewhere:
        """Own the model, unless another live node does; an earlier process of the same node is replaced at once.

        Raises NotFound for an unknown model.
        """
        ...

    def renew(self, ids: Sequence[str], worker: str) -> list[str]:
        """Extend the leases on models and sampling requests that are still ours; returns the ids that are not."""
        ...

    def release(self, id_: str, worker: str) -> None:
        """Give a lease up; a no-op when it is not ours."""
        ...

    def next(self, lease: Lease, seq: int) -> Entry | None:
        """The Op at `seq`, counted as one more attempt; None when it has not been admitted. Raises Fenced."""
        ...

    def entry(self, model_id: str, seq: int) -> Entry | None:
        """The Op at `seq` for a replay: read only."""
        ...

    def commit(self, lease: Lease, seq: int, result: Result, writes: Iterable[Write] = (), why: str = "failed") -> None:
        """Make `seq` the applied one, its result readable and the records set, and wake the poll. Raises Fenced.

        A forward_backward that failed dooms, with `why`, what already waits behind it up to the next optim_step.
        """
        ...

    def set_snapshot(self, lease: Lease, seq: int, reference: str) -> str:
        """Point at a durable snapshot, trim the journal behind it, return the one replaced. Raises Fenced."""
        ...

    def admit_sample(
        self, request_id: str, parent_id: str, owner: str, queue: str, payload: bytes, digest: str
    ) -> Admission:
        """A sampling future: deduplicated like an Op, but in no order. Raises BadRequest on other content."""
        ...

    def claim_sample(self, request_id: str, worker: str) -> Entry | None:
        """Start on a sampling request; None when it is terminal. Raises Fenced while another worker runs it."""
        ...

    def finish_sample(self, request_id: str, result: Result) -> bool:
        """Make the result readable and wake the poll; False when there already was one (it stays)."""
        ...

    def outcome(self, request_id: str) -> Result | None:
        """A terminal future's result, for a worker; None while it is pending or when it is gone."""
        ...

    def future(self, request_id: str, owner: str) -> Future:
        """Raises NotFound for an unknown or foreign id (alike), Gone for an expired one."""
        ...

    def lead(self, role: str, worker: str) -> bool:
        """True while `worker` is the one that does `role` for everybody; call again well within the lease time."""
        ...

    def pending(self, limit: int = 1000) -> list[Pending]:
        """All that is not terminal, longest without progress first."""
        ...


class Records(Protocol):
    """Small flat records by namespace and id: sessions, sampling sessions, checkpoints, workers."""

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None: ...

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        """False when there is one already (it stays)."""
        ...

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        """Set fields of a record; False when there is none (none is made)."""
        ...

    def get(self, namespace: str, key: str) -> dict[str, str] | None: ...

    def delete(self, namespace: str, key: str) -> None: ...

    def list(self, namespace: str) -> Iterator[tuple[str, dict[str, str]]]: ...


class ObjectStore(Protocol):
    """Immutable files by key. A key appears whole or not at all; there is no rename and no append."""

    def put_new(self, key: str, source: Path | bytes) -> bool:
        """Store a file; False (nothing changes) when the key exists."""
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
