"""Runs Ops that have begun, alone or several models' in one pass, and commits each in its model's order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import redis

from app.domain.results import Result
from app.errors import Fenced, NotFound, OpError, TinsmithError, Unavailable
from app.stores.interfaces.journal import Entry, OpLog
from workers.checkpoints.snapshots import Snapshots
from workers.checkpoints.writer import Outcome, Unwritten
from workers.process import telemetry
from workers.train.executor import Executor
from workers.train.owner import Attempt, Broken, Owner, Ran, Resident

log = logging.getLogger(__name__)
# Each holds a copy of what it saves until it is uploaded: an adapter, which is little, or a merged model, which is as
# much as the base. With two, an upload that hangs leaves room for the others.
_MOST_SAVES = 2


@dataclass(frozen=True, slots=True)
class Begun:
    """An Op that the journal knows to be running here."""

    resident: Resident
    entry: Entry


class Committer:
    """A state whose commit was refused, or is in doubt, is to be thrown away: here, but for the one asked for."""

    def __init__(self, oplog: OpLog, owner: Owner, executor: Executor, snapshots: Snapshots, saves: Saves) -> None:
        self._oplog, self._owner, self._executor, self._snapshots = oplog, owner, executor, snapshots
        self._saves = saves

    def run(self, group: Sequence[Begun]) -> Result | None:
        """Run the Ops of a pass and commit them. Returns the result of the last, the one that was asked for; None while
        its commit has to wait for a save that is being written.

        Raises what `commit` does for that one; another's concerns its own doorbell alone.
        """
        started = time.monotonic()
        attempts = self._attempts(group)
        run_s = time.monotonic() - started
        telemetry.PASS_OPS.observe(len(group))
        for begun, attempt in zip(group, attempts, strict=True):
            begun.resident.ran(Ran(begun.entry, attempt, run_s, len(group)))
        for at, begun in enumerate(group):
            try:
                self.commit(begun.resident)
            except (Fenced, NotFound, Unavailable):
                if begun is group[-1]:
                    raise
                self._discard([begun])
            except BaseException:
                self._discard(group[at + 1 :])
                raise
        asked = group[-1]
        return attempts[-1].result().result if asked.resident.applied == asked.entry.seq else None

    def commit(self, resident: Resident) -> None:
        """Commit what ran of a model, up to a save that is still being written.

        Raises Fenced; Unavailable for a save that was put off; and Broken and NotFound, the state being thrown away.
        """
        try:
            while resident.is_due:
                self._commit(resident, resident.uncommitted[0])
        except Unavailable:
            self._put_off(resident)
            raise
        except Fenced:
            raise
        except BaseException:
            self._owner.discard(resident.lease.model_id)
            raise

    def finish(self, resident: Resident, within_s: float) -> None:
        """Commit what ran of a model that is about to be let go, if that can be done in about so long.

        Whatever goes wrong, the journal has it all, and whoever is next.
        """
        if resident.uncommitted:
            self._saves.finish(resident.lease.model_id, within_s)
            with suppress(TinsmithError, redis.RedisError):
                self.commit(resident)

    def _put_off(self, resident: Resident) -> None:
        """The object store is away, and the model as it was: but for what ran ahead, which the journal brings back."""
        if len(resident.uncommitted) > 1:
            self._owner.discard(resident.lease.model_id)
        else:
            self._oplog.put_off(resident.lease, resident.uncommitted.popleft().entry.seq)

    def _discard(self, group: Sequence[Begun]) -> None:
        for begun in group:
            self._owner.discard(begun.resident.lease.model_id)

    def _commit(self, resident: Resident, ran: Ran) -> None:
        attempt, entry = self._came_to(resident, ran), ran.entry
        started = time.monotonic()
        try:
            told = attempt.result, attempt.writes, attempt.failure
            self._oplog.commit(resident.lease, entry.seq, *told, attempt.usage)
        except Fenced:
            telemetry.commit_refused(entry, resident.lease.epoch)
            raise
        except redis.RedisError as error:
            # Committed or not, we cannot know: the journal will tell whoever reads it next.
            raise Fenced(f"the commit of {entry.request_id} is in doubt: {error}") from error
        resident.committed()
        attempt.then()
        failed = attempt.result.failed
        commit_s = time.monotonic() - started
        telemetry.op_done(entry, failed=failed, run_s=ran.run_s, commit_s=commit_s, ops_in_pass=ran.ops_in_pass)
        self._snapshot(resident, entry, failed)

    def _came_to(self, resident: Resident, ran: Ran) -> Attempt:
        try:
            return ran.attempt.result()
        except (Unavailable, Fenced, NotFound, redis.RedisError):
            raise
        except Exception as error:
            why = f"writing {ran.entry.request_id} failed: {type(error).__name__}"
            log.exception(why)
            raise Broken(why, (resident.lease, ran.entry.seq)) from error

    def _snapshot(self, resident: Resident, entry: Entry, failed: bool) -> None:
        try:
            self._snapshots.after(resident, entry, failed=failed)
        except Exception as error:
            raise Broken(f"no snapshot of {resident.lease.model_id}: {error}", (resident.lease, entry.seq)) from error

    def _attempts(self, group: Sequence[Begun]) -> list[Future[Attempt]]:
        """What running the Ops of a pass comes to, in their order."""
        try:
            if len(group) > 1:
                return self._run_together(group)
            return [self._run_alone(group[0])]
        except Unavailable:
            # The object store is away, or this worker too old for the last of them; the models are as they were.
            for begun in group:
                self._oplog.put_off(begun.resident.lease, begun.entry.seq)
            raise
        except (Fenced, redis.RedisError):
            raise
        except Exception as error:
            why = f"{', '.join(begun.entry.request_id for begun in group)} broke the backend: {type(error).__name__}"
            log.exception(why)
            raise Broken(why, *((begun.resident.lease, begun.entry.seq) for begun in group)) from error

    def _run_alone(self, begun: Begun) -> Future[Attempt]:
        lease, entry = begun.resident.lease, begun.entry
        try:
            came_to = self._executor.run(lease, entry, begun.resident.window)
        except OpError as error:
            return Attempt.failed(entry, error).at_once()
        if isinstance(came_to, Outcome):
            return Attempt.of(came_to).at_once()
        written = self._saves.start(lease.model_id, partial(_written, entry, came_to))
        if entry.attempts:
            # It broke a worker before: should it do so again, then nothing else with it.
            self._saves.finish(lease.model_id)
        return written

    def _run_together(self, group: Sequence[Begun]) -> list[Future[Attempt]]:
        outcomes = self._executor.run_together({begun.resident.lease.model_id: begun.entry for begun in group})
        found = [(begun.entry, outcomes[begun.resident.lease.model_id]) for begun in group]
        attempts = [Attempt.failed(entry, one) if isinstance(one, OpError) else Attempt.of(one) for entry, one in found]
        return [attempt.at_once() for attempt in attempts]


def _written(entry: Entry, write: Unwritten) -> Attempt:
    """Runs in a thread of its own."""
    try:
        with telemetry.STAGE_SECONDS.labels(entry.kind, "write").time():
            return Attempt.of(write())
    except OpError as error:
        return Attempt.failed(entry, error)


class Saves:
    """Told and asked by the thread that runs the Ops.

    One whose model was thrown away meanwhile goes on, and counts until it ends: nobody will refer to what it writes.
    """

    def __init__(self) -> None:
        self._futures: dict[str, Future[Attempt]] = {}

    def start(self, model_id: str, write: Callable[[], Attempt]) -> Future[Attempt]:
        future: Future[Attempt] = Future()
        self._futures[model_id] = future

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:
                # For whoever commits it.
                future.set_exception(error)

        self.spawn(model_id, run)
        return future

    def spawn(self, model_id: str, run: Callable[[], None]) -> None:
        """In a thread that ends with the process: one that hangs must not keep it."""
        threading.Thread(target=run, name="save", daemon=True).start()

    def running(self) -> set[str]:
        """Ids of the models."""
        self._futures = {model_id: future for model_id, future in self._futures.items() if not future.done()}
        return set(self._futures)

    def has_room(self, model_id: str) -> bool:
        """For one more, of this model. Two of a model might write the same generation, with different bits."""
        running = self.running()
        return len(running) < _MOST_SAVES and model_id not in running

    def await_any(self, seconds: float) -> None:
        """Returns when one has ended, or after so long."""
        wait(self._futures.values(), seconds, FIRST_COMPLETED)

    def finish(self, model_id: str, seconds: float | None = None) -> None:
        """Returns when that of the model has ended, or after so long."""
        if model_id in self._futures:
            wait([self._futures[model_id]], seconds)
