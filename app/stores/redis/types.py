"""Values that the Redis stores take and return."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from app.domain.results import FutureState, Result
from app.errors import NotReplicated

log = logging.getLogger(__name__)
Record = Mapping[str, str]
Write = tuple[str, str, Record]
"""(namespace, id, fields): a record that is written in the same atomic step as a commit."""

RefusalKind = Literal["skip", "lost_batch", "forward_backward", "drop_gradients"]
"""The effect of a consumed seq when its turn comes: none; one lost gradient, which the same batch sent again replaces;
one that nothing replaces, as of a forward_backward that fails; or one lost gradient and all pending ones dropped."""


@dataclass(frozen=True, slots=True)
class Admission:
    """`fresh` is False for a repeat of a journaled call. `node` is the node to dispatch to: the model's live owner, or
    the sampler for a request; None for any worker. A `throttled` request is not dispatched."""

    request_id: str
    fresh: bool
    node: str | None
    throttled: bool = False


class UnreplicatedAdmission(NotReplicated):
    """A call was journaled now, but too few replicas have it yet. `admission` is the admission of this call; that of a
    repeat is not fresh any more."""

    def __init__(self, text: str, admission: Admission) -> None:
        super().__init__(text)
        self.admission = admission


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds of one queue: its most unfinished sampling requests, and the most tokens of these requests."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Lease:
    """`epoch` grows with every change of owner; a commit with an older epoch is refused.

    The other fields describe the model at that time: its applied seq, and its newest durable snapshot (empty for none).
    Entries of an epoch before `epoch_floor` belong to a history that a rebuild has abandoned.
    """

    model_id: str
    worker: str
    epoch: int
    applied: int
    snapshot: str
    snapshot_seq: int
    epoch_floor: int = 0


@dataclass(frozen=True, slots=True)
class OwnedElsewhere:
    """Another node owns the model."""

    node: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One journaled Op.

    `doomed` is the error with which it fails instead of running. `attempts` counts the workers that began it and died
    or were broken by it. `kind` is the kind of the Op, or a RefusalKind for a consumed seq, whose `doomed` is the
    reason.
    """

    seq: int
    kind: str
    request_id: str
    payload: bytes
    doomed: str
    attempts: int
    waited_s: float = 0.0
    """Seconds between admission and the start of this attempt."""
    adapter: str | None = None
    """Sampling requests: the prefix of the adapter version for which the request was admitted; empty for the base
    model. None for a request that was admitted before versions were pinned."""
    in_doubt: bool = False
    """One of the attempts belongs to a worker on another node whose heartbeat has been missing for less than a lease.
    That worker may be cut off and still running."""
    owner: str = ""
    """The project of the model; set for an Op that is about to run."""


@dataclass(frozen=True, slots=True)
class Future:
    """The state of a future, for callers who may see it; `result` is set when it is terminal. `trace` is the context of
    its trace (app/tracing), empty for none."""

    request_id: str
    kind: str
    model_id: str
    owner: str
    state: FutureState
    result: Result | None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """A waiting model or sampling request: the seconds since its last progress, and its next seq.

    `kinds`: the kinds of its waiting Ops from there on without a gap, as many as asked for; empty when the next seq has
    not arrived. `running`: a live worker has begun it. `awaited`: it was dispatched to one worker, which has not begun
    it or is gone. `throttled`: it is not dispatched yet.
    """

    id: str
    queue: str
    waited_s: float
    seq: int | None
    running: bool
    kinds: tuple[str, ...]
    awaited: bool = False
    throttled: bool = False

    @classmethod
    def read(cls, row: Sequence[Any]) -> Self | None:
        """A row of the script `pending`. Logs one that cannot be read, and returns None."""
        try:
            id_, queue, ms, seq, running, kinds, awaited, held = row
            return cls(
                id=id_.decode(),
                queue=queue.decode(),
                waited_s=float(ms) / 1000,
                seq=int(seq) if seq else None,
                kinds=tuple(kind.decode() for kind in kinds),
                running=bool(running),
                awaited=bool(awaited),
                throttled=bool(held),
            )
        except ValueError:  # the script's error in place of the fields, or a text that is not UTF-8
            log.error("a waiting call cannot be read: %r", row)
            return None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The waiting models or sampling requests of a queue: their number, and the longest time without progress."""

    number: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class NextOp:
    """The next waiting Op of a model. `size`: bytes of its content in Redis. `fresh`: no worker has begun it yet, and
    it is not doomed. `owner`: the model's project."""

    model_id: str
    seq: int
    kind: str
    size: int
    fresh: bool
    owner: str


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A model with waiting calls: `waiting` of them, all after `applied`.

    `node` holds the model, empty for none. `running`: the next call runs there; `admitted`: the next call has been
    admitted.
    """

    model_id: str
    owner: str
    queue: str
    node: str
    applied: int
    waiting: int
    running: bool
    admitted: bool


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """A sampling request without a result, whether it runs or not. It is `paused` while its session is silent."""

    request_id: str
    owner: str
    queue: str
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Unfinished:
    """`samples` are in the order of their admission, or of their release if they were throttled. Those that are
    throttled or paused come last. `sequences` are the sequences, by queue, of requests that were given to a sampler."""

    models: Sequence[ModelLine]
    samples: Sequence[WaitingSample]
    sequences: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose future is still kept; unix times in seconds by the state server's clock. `ended` is None while the
    call has not ended."""

    request_id: str
    kind: str
    state: FutureState
    admitted: float
    ended: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A completed sampling request. `size`: bytes of its result."""

    request_id: str
    failed: bool
    size: int


@dataclass(frozen=True, slots=True)
class Holder:
    """The place of a model in memory: the node that holds its lease, empty for none. `full`: see records.Model."""

    base_model: str
    node: str
    full: bool = False
