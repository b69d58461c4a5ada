"""Values that the Redis stores take and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from app.domain.results import FutureState, Result

Record = Mapping[str, str]
Write = tuple[str, str, Record]
"""(namespace, id, fields): a record that is written in the same atomic step as a commit."""

RefusalKind = Literal["skip", "lost_batch", "drop_gradients"]
"""The effect of a consumed seq when its turn comes: none, one lost gradient, or one lost gradient and all pending ones
dropped."""


@dataclass(frozen=True, slots=True)
class Admission:
    """`fresh` is False for a repeat of a journalled call. `node` is the one to ring: the model's live owner, or the
    sampler that a request goes to; None for whoever comes first. A `held` request rings nobody."""

    request_id: str
    fresh: bool
    node: str | None
    held: bool = False


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most sampling requests of one queue, and the most tokens of theirs, that may be unfinished at once."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Lease:
    """`epoch` grows with every change of owner; a commit with an older one is refused.

    The rest is the model as found: its applied seq, and its newest durable snapshot (empty for none). Entries of an
    epoch before `epoch_floor` belong to a history that a rebuild left behind.
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

    `kind` is an Op's, or a RefusalKind for a consumed seq; `doomed` then holds the reason.
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
    """A future's state for those who may see it; `result` when terminal."""

    request_id: str
    kind: str
    model_id: str
    owner: str
    state: FutureState
    result: Result | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A model or sampling request that waits: seconds since it last moved, and the next seq there.

    `kinds`: those of the Ops that wait from there on without a gap, as many as asked for; empty when the next seq has
    not come. `running`: a live worker began on it. `awaited`: one worker was rung for it, and has not begun or is gone.
    `held`: it is not dispatched yet.
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
class ModelLine:
    """A model with calls that wait: `waiting` of them, all behind `applied`. `node` holds it, empty for none.

    `running`: the next one runs there; `come`: it has been admitted.
    """

    model_id: str
    owner: str
    queue: str
    node: str
    applied: int
    waiting: int
    running: bool
    come: bool


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """A sampling request without a result, whether it runs or not."""

    request_id: str
    owner: str
    queue: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """`samples` by their admission, the first one first; `sequences` are those of a queue's requests that were given to
    a sampler."""

    models: Sequence[ModelLine]
    samples: Sequence[WaitingSample]
    sequences: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Call:
    """A call with a future that is still kept; unix times in seconds by the state server's clock, `ended` None while it
    has not."""

    request_id: str
    kind: str
    state: FutureState
    admitted: float
    ended: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampling request that came to its end. `size`: bytes of its result."""

    request_id: str
    failed: bool
    size: int


@dataclass(frozen=True, slots=True)
class Holder:
    """The place of a model in memory: the node that holds its lease, empty for none. `full`: see records.Model."""

    base_model: str
    node: str
    full: bool = False
