"""Runs Ops that have begun, one alone or several models' in one pass, and commits each in its model's order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import redis

from app.domain.results import DEVICE, TRAINED, Result
from app.errors import Fenced, NotFound, OpError, TinsmithError, Unavailable
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Entry
from workers.checkpoints.snapshots import Snapshots
from workers.checkpoints.writer import DeferredWrite
from workers.process import telemetry
from workers.train.executor import Executor
from workers.train.op_result import OpResult
from workers.train.owner import Broken, Owner, PendingCommit, Resident

log = logging.getLogger(__name__)
# Each save holds a copy of the saved state until it is uploaded. An adapter is small; a merged model is as large as the
# base. With two saves, an upload that hangs leaves room for the others.
_MOST_SAVES = 2
# What breaks a worker is writing the files, which takes seconds. An upload to a store that hangs may take for ever.
_ALONE_S = 60.0


@dataclass(frozen=True, slots=True)
class StartedOp:
    """An Op that the journal records as running here."""

    resident: Resident
    entry: Entry


class Committer:
    """Runs and commits Ops. When a commit is refused or in doubt, the state must be discarded: here for the shared Ops
    of a pass, by the caller for the requested Op. `devices`: the number of devices that a pass keeps busy."""

    def __init__(
        self,
        oplog: RedisOpLog,
        owner: Owner,
        executor: Executor,
        snapshots: Snapshots,
        background_saves: BackgroundSaves,
        devices: int,
    ) -> None:
        self._oplog, self._owner, self._executor, self._snapshots = oplog, owner, executor, snapshots
        self._background_saves, self._devices = background_saves, devices

    def run(self, group: Sequence[StartedOp]) -> Result | None:
        """Runs the Ops of a pass and commits them. Returns the result of the last one, which is the requested Op; None
        while its commit waits for a save that is still being written.

        Raises the errors of `commit` for the requested Op. An error of another Op concerns only the dispatch of that
        Op.
        """
        asked = group[-1]
        for op in group:
            telemetry.op_started(op.entry, op.entry.owner)
        started = time.monotonic()
        op_results = self._run_ops(group)
        run_s = time.monotonic() - started
        telemetry.PASS_OPS.observe(len(group))
        for op, op_result, share in zip(group, op_results, _shares(op_results), strict=True):
            device_ms = round(1000 * run_s * self._devices * share)
            op.resident.add_pending(PendingCommit(op.entry, op_result, run_s, len(group), device_ms))
        for at, op in enumerate(group):
            try:
                self.commit(op.resident)
            except (Fenced, NotFound, Unavailable):
                if op is asked:
                    raise
                self._discard([op])
            except BaseException:
                self._discard(group[at + 1 :])
                raise
        return op_results[-1].result().result if asked.resident.applied == asked.entry.seq else None

    def commit(self, resident: Resident) -> None:
        """Commits the uncommitted Ops of a model, up to a save that is still being written. Discards a state that the
        last of them spoiled: nothing runs ahead behind a failure.

        Raises Fenced; Unavailable for a save that was put off; Broken and NotFound after discarding the state.
        """
        try:
            while resident.is_due:
                self._commit(resident, resident.uncommitted[0])
        except Unavailable as error:
            for pending in resident.uncommitted:
                telemetry.op_retried(pending.entry.request_id, pending.entry.kind, type(error).__name__)
            self._put_off(resident)
            raise
        except Fenced:
            raise
        except BaseException:
            self._owner.discard(resident.model_id)
            raise

    def settle(self, resident: Resident, within_s: float) -> None:
        """Makes a model durable before it is released, as far as that takes at most about `within_s` seconds.

        If this fails, nothing is lost: the journal has every Op, and the next owner runs them.
        """
        deadline = time.monotonic() + within_s
        if resident.uncommitted:
            self._background_saves.finish(resident.model_id, within_s)
            with suppress(TinsmithError, redis.RedisError):
                self.commit(resident)
        # An object store that hangs must leave time for the snapshot on the disk.
        half = max(0.0, deadline - time.monotonic()) / 2
        self._executor.saver.shm_transfers.finish(resident.model_id, half)
        if self._owner.resident(resident.model_id) is resident:  # the commit may have discarded it
            self._snapshots.settle(resident, within_s=max(0.0, deadline - time.monotonic()))

    def _put_off(self, resident: Resident) -> None:
        """Puts the Op off: the object store is away and the model is unchanged. If Ops ran ahead, discards the state;
        the journal restores it."""
        if len(resident.uncommitted) > 1:
            self._owner.discard(resident.model_id)
        else:
            self._owner.put_off(resident.lease, resident.uncommitted.popleft().entry.seq)

    def _discard(self, group: Sequence[StartedOp]) -> None:
        for op in group:
            self._owner.discard(op.resident.model_id)

    def _commit(self, resident: Resident, pending: PendingCommit) -> None:
        op_result, entry = self._op_result(resident, pending), pending.entry
        started = time.monotonic()
        try:
            recorded = op_result.result, op_result.writes, op_result.failure
            point = op_result.point and replace(op_result.point, seconds=round(pending.run_s, 6))
            usage = {**op_result.usage, DEVICE: pending.device_ms} if pending.device_ms else op_result.usage
            self._oplog.commit(resident.lease, entry.seq, *recorded, usage, point)
        except Fenced:
            telemetry.commit_refused(entry, resident.lease.epoch)
            raise
        except (Unavailable, redis.RedisError) as error:
            # The commit may or may not have happened; the next reader of the journal will see. It did not happen if the
            # staged result lapsed, but the state has the effect of the Op already.
            raise Fenced(f"the commit of {entry.request_id} may or may not have happened: {error}") from error
        resident.committed()
        op_result.after_commit()
        failed = op_result.result.failed
        commit_s = time.monotonic() - started
        telemetry.op_done(entry, failed=failed, run_s=pending.run_s, commit_s=commit_s, ops_in_pass=pending.ops_in_pass)
        if op_result.spoils:
            self._owner.discard(resident.model_id)
        else:
            self._snapshot(resident, entry, failed)

    def _op_result(self, resident: Resident, pending: PendingCommit) -> OpResult:
        try:
            return pending.op_result.result()
        except (Unavailable, Fenced, NotFound, redis.RedisError):
            raise
        except Exception as error:
            why = f"writing {pending.entry.request_id} failed: {type(error).__name__}"
            log.exception(why)
            raise Broken(why, (resident.lease, pending.entry.seq)) from error

    def _snapshot(self, resident: Resident, entry: Entry, failed: bool) -> None:
        try:
            self._snapshots.after(resident, entry, failed=failed)
        except Exception as error:
            raise Broken(f"the snapshot of {resident.model_id} failed: {error}", (resident.lease, entry.seq)) from error

    def _run_ops(self, group: Sequence[StartedOp]) -> list[Future[OpResult]]:
        """Runs the Ops of a pass. Returns the result of each, in the order of the Ops."""
        try:
            if len(group) > 1:
                return self._run_together(group)
            return [self._run_alone(group[0])]
        except (Fenced, Unavailable, redis.RedisError) as error:
            # A server is away, another worker owns a model, or this worker is too old for the last Op.
            for op in group:
                self._owner.put_off(op.resident.lease, op.entry.seq)
                if isinstance(error, Fenced):  # its owner may have ended it
                    telemetry.op_abandoned(op.entry.request_id, type(error).__name__)
                else:
                    telemetry.op_retried(op.entry.request_id, op.entry.kind, type(error).__name__)
            raise
        except Exception as error:
            for op in group:
                telemetry.op_abandoned(op.entry.request_id, f"the backend failed: {type(error).__name__}")
            why = f"{', '.join(op.entry.request_id for op in group)} broke the backend: {type(error).__name__}"
            log.exception(why)
            raise Broken(why, *((op.resident.lease, op.entry.seq) for op in group)) from error

    def _run_alone(self, op: StartedOp) -> Future[OpResult]:
        lease, entry = op.resident.lease, op.entry
        try:
            ran = self._executor.run(lease, entry, op.resident.accumulation)
        except OpError as error:
            return OpResult.failed(entry, error).as_future()
        if isinstance(ran, OpResult):
            return ran.as_future()
        written = self._background_saves.start(lease.model_id, partial(_written, entry, ran))
        if entry.attempts:
            # This Op broke a worker before. If it does so again, nothing else must run beside it.
            self._background_saves.finish(lease.model_id, _ALONE_S)
        return written

    def _run_together(self, group: Sequence[StartedOp]) -> list[Future[OpResult]]:
        started = [(op.resident.lease, op.entry, op.resident.accumulation) for op in group]
        return [op_result.as_future() for op_result in self._executor.run_together(started)]


def _shares(op_results: Sequence[Future[OpResult]]) -> list[float]:
    """Each Op's share of the time of its pass, by its tokens; steps have equal shares. A failed Op has an average
    share, which counts for no project."""
    if len(op_results) == 1:
        return [1.0]
    tokens = [None if one.failure else one.usage.get(TRAINED, 1) for one in (each.result() for each in op_results)]
    known = [each for each in tokens if each is not None]
    average = sum(known) / len(known) if known else 1.0
    weights = [average if each is None else each for each in tokens]
    return [weight / sum(weights) for weight in weights]


def _written(entry: Entry, write: DeferredWrite) -> OpResult:
    """Writes a save; runs in its own thread."""
    try:
        with telemetry.STAGE_SECONDS.labels(entry.kind, "write").time():
            return write()
    except OpError as error:
        return OpResult.failed(entry, error)


class BackgroundSaves:
    """The background saves. Used only from the op thread.

    If a model's state is discarded meanwhile, its save continues and counts until it ends; nothing refers to the files
    it writes.
    """

    def __init__(self) -> None:
        self._futures: dict[str, Future[OpResult]] = {}

    def start(self, model_id: str, write: Callable[[], OpResult]) -> Future[OpResult]:
        future: Future[OpResult] = Future()

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:
                # The commit raises it.
                future.set_exception(error)

        self.spawn(model_id, run)
        # Not before: a thread that cannot be started would leave a save that never ends. It may be done already.
        self._futures[model_id] = future
        return future

    def spawn(self, model_id: str, run: Callable[[], None]) -> None:
        """Runs `run` in a daemon thread, so that a save that hangs does not keep the process alive."""
        threading.Thread(target=run, name="save", daemon=True).start()

    def running(self) -> set[str]:
        """Ids of the models whose save is still being written."""
        self._futures = {model_id: future for model_id, future in self._futures.items() if not future.done()}
        return set(self._futures)

    def has_room(self, model_id: str) -> bool:
        """True if one more save of this model may start. Two saves of one model might write the same generation with
        different bits."""
        running = self.running()
        return len(running) < _MOST_SAVES and model_id not in running

    def await_any(self, seconds: float) -> None:
        """Returns when one save has ended, or after `seconds`."""
        wait(self._futures.values(), seconds, FIRST_COMPLETED)

    def finish(self, model_id: str, seconds: float) -> None:
        """Returns when the model's save has ended, or after `seconds`."""
        if model_id in self._futures:
            wait([self._futures[model_id]], seconds)
