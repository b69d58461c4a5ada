"""Runs Ops that have begun, alone or several models' in one pass, and commits each for itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from app.domain.results import Result
from app.errors import Fenced, OpError, Unavailable
from app.stores.interfaces import Entry, OpLog, Write
from workers import results, telemetry
from workers.executor import Executor
from workers.owner import Broken, Owner, Resident
from workers.snapshots.schedule import Snapshots

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What running an Op came to; `failure` is empty for success."""

    result: Result
    writes: Sequence[Write] = ()
    failure: str = ""

    @classmethod
    def failed(cls, entry: Entry, error: OpError) -> Attempt:
        return cls(results.of_error(error), (), f"{entry.kind} seq {entry.seq} failed: {error}")


@dataclass(frozen=True, slots=True)
class Begun:
    """An Op that the journal knows to be running here."""

    resident: Resident
    entry: Entry


class Committer:
    """A state whose commit was refused, or is in doubt, is to be thrown away: here, but for the one asked for."""

    def __init__(self, oplog: OpLog, owner: Owner, executor: Executor, snapshots: Snapshots) -> None:
        self._oplog, self._owner, self._executor, self._snapshots = oplog, owner, executor, snapshots

    def run(self, group: Sequence[Begun]) -> Result:
        """Run and commit the Ops of a pass; returns the result of the last, the one that was asked for.

        Raises Fenced when that one's commit was refused; another's concerns its own doorbell alone.
        """
        started = time.monotonic()
        attempts = self._attempts(group)
        run_s = time.monotonic() - started
        telemetry.PASS_OPS.observe(len(group))
        for at, (begun, attempt) in enumerate(zip(group, attempts, strict=True)):
            try:
                self._commit(begun, attempt, run_s, len(group))
            except Fenced:
                if begun is group[-1]:
                    raise
                self._discard([begun])
            except BaseException:
                self._discard(group[at:])
                raise
        return attempts[-1].result

    def _discard(self, group: Sequence[Begun]) -> None:
        for begun in group:
            self._owner.discard(begun.resident.lease.model_id)

    def _commit(self, begun: Begun, attempt: Attempt, run_s: float, ops_in_pass: int) -> None:
        resident, entry = begun.resident, begun.entry
        ran = time.monotonic()
        try:
            self._oplog.commit(resident.lease, entry.seq, attempt.result, attempt.writes, attempt.failure)
        except Fenced:
            telemetry.commit_refused(entry, resident.lease.epoch)
            raise
        except redis.RedisError as error:
            # Committed or not, we cannot know: the journal will tell whoever reads it next.
            raise Fenced(f"the commit of {entry.request_id} is in doubt: {error}") from error
        resident.applied = entry.seq
        resident.window = resident.window.after(entry, attempt.failure)
        failed = attempt.result.failed
        commit_s = time.monotonic() - ran
        telemetry.op_done(entry, failed=failed, run_s=run_s, commit_s=commit_s, ops_in_pass=ops_in_pass)
        self._snapshot(resident, entry, failed)

    def _snapshot(self, resident: Resident, entry: Entry, failed: bool) -> None:
        try:
            self._snapshots.after(resident, entry, failed=failed)
        except Exception as error:
            raise Broken(f"no snapshot of {resident.lease.model_id}: {error}", (resident.lease, entry.seq)) from error

    def _attempts(self, group: Sequence[Begun]) -> list[Attempt]:
        """What running the Ops of a pass comes to, in their order."""
        try:
            if len(group) > 1:
                return self._run_together(group)
            return [self._run_alone(group[0])]
        except Unavailable:
            # The object store is away and the model as it was.
            self._oplog.put_off(group[0].resident.lease, group[0].entry.seq)
            raise
        except (Fenced, redis.RedisError):
            raise
        except Exception as error:
            why = f"{', '.join(begun.entry.request_id for begun in group)} broke the backend: {type(error).__name__}"
            log.exception(why)
            raise Broken(why, *((begun.resident.lease, begun.entry.seq) for begun in group)) from error

    def _run_alone(self, begun: Begun) -> Attempt:
        try:
            return Attempt(*self._executor.run(begun.resident.lease, begun.entry, begun.resident.window))
        except OpError as error:
            return Attempt.failed(begun.entry, error)

    def _run_together(self, group: Sequence[Begun]) -> list[Attempt]:
        outcomes = self._executor.run_together({begun.resident.lease.model_id: begun.entry for begun in group})
        found = [(begun.entry, outcomes[begun.resident.lease.model_id]) for begun in group]
        return [Attempt.failed(entry, one) if isinstance(one, OpError) else Attempt(one) for entry, one in found]
