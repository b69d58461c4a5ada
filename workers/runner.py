"""Runs models' journals in order. A doorbell for seq k runs the contiguous journal up to k and answers with k's result.

What makes an effect happen exactly once is here: only applied + 1 runs, its commit is fenced, and a state whose commit
is in doubt is thrown away and rebuilt from the journal.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import redis

from app import doorbell, ids
from app.domain.results import Result
from app.errors import Fenced, Gone, NotFound, OpError, ServerOpError, Unavailable
from app.stores.interfaces import Entry, HeldElsewhere, OpLog, Write
from workers import results, telemetry
from workers.executor import Executor
from workers.outcome import NotNow
from workers.owner import MAX_ATTEMPTS, Broken, Exhausted, Owner, Resident, Unrestorable
from workers.parked import Parked
from workers.snapshots.schedule import Snapshots

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What running an Op came to; `failure` is empty for success."""

    result: Result
    writes: Sequence[Write] = ()
    failure: str = ""


class TrainingRunner:
    """`ring(kind, request id, model id, queue)` is the doorbell; `queue` is the one all trainers of the base read.

    `end(why)` ends this process, to be started again; it is called when the backend is of no further use.
    """

    def __init__(
        self,
        oplog: OpLog,
        owner: Owner,
        executor: Executor,
        snapshots: Snapshots,
        parked: Parked,
        ring: Callable[[str, str, str, str], None],
        queue: str,
        end: Callable[[str], NoReturn],
    ) -> None:
        self._oplog, self._owner, self._executor = oplog, owner, executor
        self._snapshots, self._parked = snapshots, parked
        self._ring, self._queue, self._end = ring, queue, end

    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        """The future's result; None when it no longer exists. Raises NotNow when it must be rung again."""
        seq = int(request_id.rpartition(":")[2])
        try:
            return self._result(request_id, model_id, seq, kind)
        except (NotFound, Gone):
            self._parked.forget(model_id)
            return self._oplog.outcome(request_id)
        except Unavailable as error:
            self._parked.put_off(model_id, seq, kind)
            raise NotNow(f"{request_id}: {error}") from error
        except Fenced as fenced:
            self._owner.discard(model_id)
            raise self._again(request_id, model_id, kind, str(fenced)) from None
        except Broken as broken:
            self._start_over(broken)
            raise self._again(request_id, model_id, kind, str(broken)) from None
        except redis.RedisError:
            # Else the lease would go on telling the sweeper that the Op runs here.
            self._owner.discard(model_id)
            raise

    def _result(self, request_id: str, model_id: str, seq: int, kind: str) -> Result | None:
        try:
            resident = self._own(model_id, request_id, kind)
        except Unrestorable as lost:
            return self._fail_through(lost, seq)
        except Exhausted as spent:
            failure = _given_up(spent.entry)
            self._oplog.commit(spent.lease, spent.entry.seq, failure.result, (), failure.failure)
            if seq > spent.entry.seq:
                return self._result(request_id, model_id, seq, kind)
            return self._oplog.outcome(request_id)
        if seq <= resident.applied:
            self._parked.moved_on(model_id)
            return self._oplog.outcome(request_id)
        return self._run_through(resident, seq, kind)

    def _own(self, model_id: str, request_id: str, kind: str) -> Resident:
        resident = self._owner.own(model_id)
        if isinstance(resident, HeldElsewhere):
            self._parked.forget(model_id)
            self._ring(kind, request_id, model_id, doorbell.direct_queue(self._queue, resident.node))
            raise NotNow(f"{model_id} is owned by {resident.node}")
        return resident

    def _run_through(self, resident: Resident, seq: int, kind: str) -> Result:
        """The result of `seq`, which is beyond the applied one."""
        model_id = resident.lease.model_id
        while resident.applied < seq:
            entry = self._oplog.next(resident.lease, resident.applied + 1)
            if entry is None:
                self._parked.park(model_id, seq, kind)
                raise NotNow(f"seq {resident.applied + 1} of {model_id} has not arrived")
            result = self._step(resident, entry)
        self._parked.moved_on(model_id)
        return result

    def _fail_through(self, lost: Unrestorable, seq: int) -> Result | None:
        """Nothing that waits can ever run: after as many attempts as any Op has, it fails and says why."""
        for at in range(lost.lease.applied + 1, seq + 1):
            entry = self._oplog.next(lost.lease, at)
            if entry is None:
                raise NotNow(str(lost))
            if entry.attempts + 1 < MAX_ATTEMPTS:
                self._oplog.strike(lost.lease, at)
                raise NotNow(str(lost))
            failure = _failed(entry, ServerOpError(str(lost)))
            self._oplog.commit(lost.lease, at, failure.result, (), failure.failure)
        return self._oplog.outcome(ids.request_id(lost.lease.model_id, seq))

    def _step(self, resident: Resident, entry: Entry) -> Result:
        started = time.monotonic()
        attempt = self._attempt(resident, entry)
        ran = time.monotonic()
        try:
            self._oplog.commit(resident.lease, entry.seq, attempt.result, attempt.writes, attempt.failure)
        except Fenced:
            telemetry.commit_refused(entry, resident.lease.epoch)
            raise
        except redis.RedisError as error:
            # Committed or not, we cannot know: the journal will tell whoever reads it next.
            raise Fenced(f"the commit of {entry.request_id} is in doubt: {error}") from error
        except BaseException:
            self._owner.discard(resident.lease.model_id)
            raise
        resident.applied = entry.seq
        resident.window = resident.window.after(entry, attempt.failure)
        failed = attempt.result.failed
        telemetry.op_done(entry, failed=failed, run_s=ran - started, commit_s=time.monotonic() - ran)
        self._snapshot(resident, entry, failed)
        return attempt.result

    def _snapshot(self, resident: Resident, entry: Entry, failed: bool) -> None:
        try:
            self._snapshots.after(resident, entry, failed=failed)
        except Exception as error:
            raise Broken(resident.lease, entry.seq, f"no snapshot of {resident.lease.model_id}: {error}") from error

    def _attempt(self, resident: Resident, entry: Entry) -> Attempt:
        try:
            return Attempt(*self._executor.run(resident.lease, entry, resident.window))
        except OpError as error:
            return _failed(entry, error)
        except Unavailable:
            # The object store is away and the model as it was.
            self._oplog.put_off(resident.lease, entry.seq)
            raise
        except (Fenced, redis.RedisError):
            raise
        except Exception as error:
            log.exception("an Op broke the backend", extra={"request_id": entry.request_id})
            why = f"{entry.request_id} broke the backend: {type(error).__name__}"
            raise Broken(resident.lease, entry.seq, why) from error

    def _start_over(self, broken: Broken) -> None:
        """The backend's promise: after anything but an OpError every state it holds is suspect, or it all is."""
        with contextlib.suppress(redis.RedisError):
            self._oplog.strike(broken.lease, broken.seq)
        if not self._executor.backend.healthy():
            self._end(str(broken))
        self._owner.discard_all()

    def _again(self, request_id: str, model_id: str, kind: str, why: str) -> NotNow:
        self._ring(kind, request_id, model_id, self._queue)
        return NotNow(why)


def _given_up(entry: Entry) -> Attempt:
    text = f"{entry.kind} seq {entry.seq} could not be run in {MAX_ATTEMPTS} attempts; it was given up"
    return _failed(entry, ServerOpError(text))


def _failed(entry: Entry, error: OpError) -> Attempt:
    return Attempt(results.of_error(error), (), f"{entry.kind} seq {entry.seq} failed: {error}")
