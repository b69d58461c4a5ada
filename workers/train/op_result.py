"""The result of running an Op: what its commit records, and what follows the commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from app.domain.progress import Point
from app.domain.results import Result, Usage
from app.errors import OpError, WeightsOverflow
from app.stores.redis.types import Entry, Write
from app.wire import results


@dataclass(frozen=True, slots=True)
class OpResult:
    """The result of running an Op. `failure` is empty for success. `after_commit` is to be called after the commit,
    which stores `writes`, counts `usage` and adds `point` to the run's progress. An Op that `spoils` the model's state
    has it discarded after the commit."""

    result: Result
    writes: Sequence[Write] = ()
    after_commit: Callable[[], None] = lambda: None
    usage: Usage = field(default_factory=dict)
    point: Point | None = None
    failure: str = ""
    spoils: bool = False

    @classmethod
    def failed(cls, entry: Entry, error: OpError) -> OpResult:
        failure = f"{entry.kind} seq {entry.seq} failed: {error}"
        return cls(results.of_error(error), failure=failure, spoils=isinstance(error, WeightsOverflow))

    def as_future(self) -> Future[OpResult]:
        """This result as a future that is already done, for an Op with nothing to wait for."""
        future: Future[OpResult] = Future()
        future.set_result(self)
        return future
