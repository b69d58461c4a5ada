"""What running an Op came to, on its way to the commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from app.domain.results import Result
from app.domain.usage import Usage
from app.errors import OpError
from app.stores.interfaces import Entry, Write
from workers import results
from workers.saving import Outcome


@dataclass(frozen=True, slots=True)
class Attempt:
    """`failure` is empty for success. `then` is to be called once it is committed, which
    counts `usage`."""

    result: Result
    writes: Sequence[Write] = ()
    failure: str = ""
    then: Callable[[], None] = lambda: None
    usage: Usage = field(default_factory=dict)

    @classmethod
    def of(cls, outcome: Outcome) -> Attempt:
        return cls(outcome.result, outcome.writes, then=outcome.then, usage=outcome.usage)

    @classmethod
    def failed(cls, entry: Entry, error: OpError) -> Attempt:
        return cls(results.of_error(error), (), f"{entry.kind} seq {entry.seq} failed: {error}")

    def at_once(self) -> Future[Attempt]:
        """As the future of an Op that has nothing to wait for."""
        future: Future[Attempt] = Future()
        future.set_result(self)
        return future


@dataclass(frozen=True, slots=True)
class Ran:
    """An Op that ran and is not committed yet; `attempt` is not done while it is a save that is being written.

    `run_s`: seconds for which it, and the other `ops_in_pass` - 1 Ops of its pass, kept everything else waiting.
    """

    entry: Entry
    attempt: Future[Attempt]
    run_s: float
    ops_in_pass: int

    @property
    def failure(self) -> str:
        """Empty for success, and while it is being written."""
        is_written = self.attempt.done() and self.attempt.exception() is None
        return self.attempt.result().failure if is_written else ""
