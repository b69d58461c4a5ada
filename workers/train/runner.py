"""Runs models' journals in order. A dispatch of seq k runs the contiguous journal up to k and returns k's result.

This module makes each effect happen exactly once: only applied + 1 runs, its commit is fenced, and a state whose commit
is in doubt is discarded and rebuilt from the journal.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

import redis

from app import ids
from app.dispatch import Send, direct_queue
from app.domain import ops
from app.domain.results import Result
from app.errors import (
    Fenced,
    Gone,
    NewerContent,
    NotFound,
    NoTurnYet,
    Requeue,
    ServerOpError,
    TinsmithError,
    Unavailable,
)
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Entry, Lease, NextOp, OwnedElsewhere
from workers.process import telemetry
from workers.train.committer import BackgroundSaves, Committer, StartedOp
from workers.train.op_result import OpResult
from workers.train.owner import (
    MAX_ATTEMPTS,
    Broken,
    Exhausted,
    NoMemoryToRestore,
    Owner,
    Resident,
    Unrestorable,
)
from workers.train.scheduler import RetryBackoff, Scheduler

log = logging.getLogger(__name__)
# Poll interval in seconds for new Ops while a save is being written.
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A dispatch of the Op at `seq`."""

    model_id: str
    seq: int
    kind: str

    @property
    def request_id(self) -> str:
        return ids.request_id(self.model_id, self.seq)


class TrainingRunner:
    """Handles the dispatches of a trainer.

    All trainers of the base read `queue`. `end(why)` ends this process, which is then started again; it is called when
    the backend is no longer `healthy`. `gpu_turn` waits until the trainer may use its GPUs, as long as its block; it
    raises NoTurnYet after a while. The trainer need not wait while it `has_gpu_turn`.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        owner: Owner,
        committer: Committer,
        healthy: Callable[[], bool],
        retry_backoff: RetryBackoff,
        scheduler: Scheduler,
        background_saves: BackgroundSaves,
        send: Send,
        queue: str,
        end: Callable[[str], NoReturn],
        gpu_turn: Callable[[], AbstractContextManager[object]],
        has_gpu_turn: Callable[[], bool],
    ) -> None:
        self._oplog, self._owner, self._committer, self._healthy = oplog, owner, committer, healthy
        self._retry_backoff, self._scheduler, self._background_saves = retry_backoff, scheduler, background_saves
        self._send, self._queue, self._end = send, queue, end
        self._gpu_turn, self._has_gpu_turn = gpu_turn, has_gpu_turn
        self._leaving = False

    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        """Returns the future's result; None when the future no longer exists. Raises Requeue when it must be dispatched
        again."""
        return self._handle(Dispatch(model_id, ids.seq_of(request_id), kind), self._result_with_gpu)

    def leave(self) -> None:
        """Announces that this worker is about to end: no dispatch waits any longer for a save, for others' turns or for
        the GPU. May be called from any thread."""
        self._leaving = True

    def commit_saves(self, but: str = "") -> None:
        """Commits the saves that have been written and the Ops that ran ahead of them, for all models except `but`."""
        for model_id, resident in self._owner.residents().items():
            if model_id != but and resident.is_due:
                first = resident.uncommitted[0].entry
                self._serve(Dispatch(model_id, first.seq, first.kind))

    def _handle(self, dispatch: Dispatch, run: Callable[[Dispatch], Result | None]) -> Result | None:
        """Handles one dispatch with `run`, and every error of its model."""
        model_id = dispatch.model_id
        try:
            if self._owner.resident(model_id) is None and self._retry_backoff.holds_back(model_id):
                return self._hold_back(dispatch)
            return run(dispatch)
        except (NotFound, Gone):
            self._retry_backoff.forget(model_id)
            return self._oplog.outcome(dispatch.request_id)
        except NewerContent as newer:
            return self._leave_to_newer(dispatch, newer)
        except Unavailable as error:
            self._retry_backoff.retry_later(dispatch.model_id, dispatch.seq, dispatch.kind)
            raise Requeue(f"{dispatch.request_id}: {error}") from error
        except Fenced as fenced:
            self._owner.discard(model_id)
            raise self._requeue(dispatch, str(fenced)) from None
        except NoMemoryToRestore as short:
            return self._restore_later(dispatch, short.lease, short)
        except Broken as broken:
            self._start_over(broken)
            lease = broken.restored
            if lease is not None and (dispatch.seq <= lease.applied or not broken.ops):
                return self._restore_later(dispatch, lease, broken)
            raise self._requeue(dispatch, str(broken)) from None
        except redis.RedisError:
            # Otherwise the lease would go on telling the redispatch task that the Op runs here.
            self._owner.discard(model_id)
            raise

    def _hold_back(self, dispatch: Dispatch) -> Result:
        """Handles a dispatch of a model that backs off, without a restore: it may take seconds, and all other models
        wait meanwhile. Raises Requeue unless the Op has ended."""
        result = self._oplog.outcome(dispatch.request_id)
        if result is None:
            self._retry_backoff.add(dispatch.model_id, dispatch.seq, dispatch.kind)
            raise Requeue(f"{dispatch.model_id} is not here, and its next try is not due")
        self._retry_backoff.drop(dispatch.model_id, dispatch.seq)
        return result

    def _result_with_gpu(self, dispatch: Dispatch) -> Result | None:
        """Calls `_result` again after each NoTurnYet, because a save may be due by then. Raises Requeue in a worker
        that leaves."""
        while True:
            try:
                return self._result(dispatch)
            except NoTurnYet as error:
                if self._leaving:  # nobody else dispatches a call of a model that this worker does not hold
                    raise self._requeue(dispatch, str(error)) from None

    def _result(self, dispatch: Dispatch) -> Result | None:
        """Loops until the Op is the applied one, and runs before each Op what has to run first. In each round the model
        may have been restored, or may be owned elsewhere."""
        served: dict[str, int] = {}
        while True:
            self.commit_saves(but=dispatch.model_id)
            resident = self._own_unless_ended(dispatch)
            if resident is None:
                return self._oplog.outcome(dispatch.request_id)
            waiting = self._scheduler.waiting()
            first = self._scheduler.next_before(resident, waiting, served)
            if first is not None:
                if self._leaving:
                    raise Requeue(f"{dispatch.request_id} waits for other calls, and this worker is about to end")
                served[first.model_id] = first.seq
                with self._gpu_turn():
                    self._serve(Dispatch(first.model_id, first.seq, first.kind))
                continue
            if not self._scheduler.is_blocked(resident, waiting):
                result = self._take_turn(resident, dispatch, waiting)
                if dispatch.seq == resident.applied:
                    return result
            elif not served:
                self._await_saves(dispatch)
            served.clear()

    def _run_at_once(self, dispatch: Dispatch) -> None:
        """Runs the model's next Op unless that of the dispatch has ended. Nothing runs first, and no save is waited
        for."""
        resident = self._own_unless_ended(dispatch)
        if resident is None:
            return
        waiting = self._scheduler.waiting()
        if not self._scheduler.is_blocked(resident, waiting):
            self._take_turn(resident, dispatch, waiting)

    def _own_unless_ended(self, dispatch: Dispatch) -> Resident | None:
        """Owns the model and commits what can be committed. Returns None if the Op has ended by then: Ops that can
        never run fail here."""
        model_id, seq = dispatch.model_id, dispatch.seq
        while True:
            try:
                resident = self._own(dispatch)
            except Unrestorable as lost:
                self._fail_through(lost, seq)
                self._retry_backoff.advanced(model_id, ended=seq)
                return None
            except Exhausted as spent:
                self._fail(spent.lease, spent.entry, _given_up(spent.entry))
                telemetry.GIVEN_UP.labels(spent.entry.kind).inc()
                self._retry_backoff.advanced(model_id)
                if seq <= spent.entry.seq:
                    return None
            else:
                self._committer.commit(resident)
                if seq <= resident.applied:
                    self._retry_backoff.advanced(model_id)
                    return None
                if self._owner.resident(model_id) is resident:  # a committed Op may have spoiled the state
                    return resident

    def _take_turn(self, resident: Resident, dispatch: Dispatch, waiting: Sequence[NextOp]) -> Result | None:
        """Runs the model's next Op, and returns its result as `_run_next` does."""
        self._check_arrived(resident, dispatch)
        with self._gpu_turn():  # before an Op begins, so that waiting is neither device time nor an attempt
            result = self._run_next(resident, dispatch, self._scheduler.batched_with(resident, waiting))
        if dispatch.seq == resident.applied:
            self._retry_backoff.advanced(dispatch.model_id)
        return result

    def _check_arrived(self, resident: Resident, dispatch: Dispatch) -> None:
        """Raises Requeue when the wait for a turn would be for nothing, because the model's next Op is missing."""
        at = {dispatch.model_id: resident.reached + 1}
        if not self._has_gpu_turn() and not self._oplog.heads(at):
            raise self._missing(resident, dispatch)

    def _missing(self, resident: Resident, dispatch: Dispatch) -> Requeue:
        self._retry_backoff.add(dispatch.model_id, dispatch.seq, dispatch.kind)
        return Requeue(f"seq {resident.reached + 1} of {dispatch.model_id} has not arrived")

    def _await_saves(self, dispatch: Dispatch) -> None:
        if self._leaving:
            raise Requeue(f"{dispatch.request_id} waits for a save, and this worker is about to end")
        self._background_saves.await_any(_POLL_S)

    def _own(self, dispatch: Dispatch) -> Resident:
        resident = self._owner.own(dispatch.model_id)
        if isinstance(resident, OwnedElsewhere):
            self._retry_backoff.forget(dispatch.model_id)
            self._send(dispatch.kind, dispatch.request_id, dispatch.model_id, direct_queue(self._queue, resident.node))
            raise Requeue(f"{dispatch.model_id} is owned by {resident.node}")
        return resident

    def _serve(self, dispatch: Dispatch) -> None:
        """Gives another model its turn. Errors there are handled as if its own dispatch had arrived."""
        with contextlib.suppress(Requeue):
            self._handle(dispatch, self._run_at_once)

    def _run_next(self, resident: Resident, dispatch: Dispatch, batched_with: Sequence[NextOp]) -> Result | None:
        """Returns the result of the model's next Op, which may share its pass with `batched_with`; None while its
        commit waits."""
        resident.served = time.monotonic()
        entry = self._owner.begin(resident.lease, resident.reached + 1)
        if entry is None:
            raise self._missing(resident, dispatch)
        self._scheduler.begin(entry.owner)
        group = [*(op for head in batched_with if (op := self._begin(head))), StartedOp(resident, entry)]
        started = time.monotonic() - resident.take_debt()
        try:
            return self._committer.run(group)
        finally:
            self._charge(group, time.monotonic() - started)

    def _charge(self, group: Sequence[StartedOp], seconds: float) -> None:
        """Charges a pass. Raises nothing: an error here would hide that of the pass, after which a state may have to
        go."""
        try:
            self._scheduler.charge([op.entry for op in group], seconds)
        except Exception:
            log.exception("could not charge a pass to its projects")

    def _begin(self, head: NextOp) -> StartedOp | None:
        """Begins an Op that shares a pass. Returns None when its model was lost meanwhile, or when only a newer worker
        can read it; the dispatch of that Op then handles this."""
        resident = self._owner.residents()[head.model_id]
        try:
            entry = self._owner.begin(resident.lease, head.seq)
        except (Fenced, Unavailable, redis.RedisError):
            return None
        if entry is not None and ops.is_newer(entry.payload):
            self._owner.put_off(resident.lease, entry.seq)
            return None
        resident.served = time.monotonic()
        return StartedOp(resident, entry) if entry is not None else None

    def _fail_through(self, lost: Unrestorable, seq: int) -> None:
        """Fails waiting Ops that can never run. Each fails with the reason: at once where an attempt would end this
        worker, else after as many attempts as any Op has."""
        for at in range(lost.lease.applied + 1, seq + 1):
            entry = self._owner.begin(lost.lease, at)
            if entry is None:
                raise Requeue(str(lost))
            if entry.attempts + 1 < MAX_ATTEMPTS and not lost.at_once:
                self._oplog.strike(lost.lease, at)
                raise Requeue(str(lost))
            self._fail(lost.lease, entry, str(lost))
            if not lost.at_once:
                telemetry.GIVEN_UP.labels(entry.kind).inc()

    def _fail(self, lease: Lease, entry: Entry, why: str) -> None:
        """Commits the failure of an Op that is not run here."""
        started = time.monotonic()
        failure = OpResult.failed(entry, ServerOpError(why))
        self._oplog.commit(lease, entry.seq, failure.result, (), failure.failure)
        telemetry.op_done(entry, failed=True, run_s=0.0, commit_s=time.monotonic() - started)

    def _leave_to_newer(self, dispatch: Dispatch, newer: NewerContent) -> Result | None:
        """Releases a model that only a newer worker can continue; the redispatch task then dispatches it.

        Returns the result if there is one by now. Otherwise the Op is tried again later, as there may be no newer
        worker yet.
        """
        request_id, model_id = dispatch.request_id, dispatch.model_id
        self._owner.evict(model_id)
        result = self._oplog.outcome(request_id)
        if result is not None:
            self._retry_backoff.forget(model_id)
            return result
        log.warning(
            "a call waits for a worker of a newer version: %s",
            newer,
            extra={"request_id": request_id, "model_id": model_id},
        )
        self._retry_backoff.retry_later(dispatch.model_id, dispatch.seq, dispatch.kind)
        raise Requeue(f"{request_id}: {newer}") from newer

    def _restore_later(self, dispatch: Dispatch, lease: Lease, failure: TinsmithError) -> Result | None:
        """Tries the failed restore of a model again after a pause, if the Op needs it. At once, it might fail without
        end. Returns the result of an Op that has ended."""
        request_id, model_id = dispatch.request_id, dispatch.model_id
        log.warning("a restore failed: %s", failure, extra={"request_id": request_id, "model_id": model_id})
        if dispatch.seq > lease.applied:
            self._retry_backoff.retry_later(dispatch.model_id, dispatch.seq, dispatch.kind)
            raise Requeue(f"{request_id}: {failure}") from failure
        self._retry_backoff.drop(model_id, dispatch.seq)
        return self._oplog.outcome(request_id)

    def _start_over(self, broken: Broken) -> None:
        """Discards all states, as the backend's contract asks: after anything but an OpError every state it holds is
        suspect. Ends the process if the whole backend is."""
        with contextlib.suppress(redis.RedisError):
            for lease, seq in broken.ops:
                self._oplog.strike(lease, seq)
        if not self._healthy():
            self._end(str(broken))
        self._owner.discard_all()

    def _requeue(self, dispatch: Dispatch, why: str) -> Requeue:
        self._send(dispatch.kind, dispatch.request_id, dispatch.model_id, self._queue)
        return Requeue(why)


def _given_up(entry: Entry) -> str:
    return f"{entry.kind} seq {entry.seq} could not be run in {MAX_ATTEMPTS} attempts and was given up"
