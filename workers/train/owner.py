"""The models this worker owns: each has a lease and a live state, which are gained and discarded together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import redis

from app import ids
from app.domain import ops
from app.errors import Fenced, NewerContent, NoMemory, NotFound, OpError, Requeue, TinsmithError, Unavailable
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Entry, Lease, OwnedElsewhere
from workers.backends.training.base import TrainingBackend
from workers.process import telemetry
from workers.process.liveness import LeaseKeeper
from workers.train.executor import GradAccumulation
from workers.train.op_result import OpResult

log = logging.getLogger(__name__)
_SETTLE_S = 5.0
MAX_ATTEMPTS = 3


@dataclass
class Resident:
    """A model with its live state. The state contains all Ops up to `reached`; those up to `applied` are committed.
    `uncommitted` holds the rest: a save that is being written, then the Ops that ran behind it.

    `used` is the time of its last request and `served` that of its last turn (both monotonic). Its next turn is charged
    `debt_s`, the seconds its restore took.
    """

    lease: Lease
    applied: int
    accumulation: GradAccumulation
    used: float = field(default_factory=time.monotonic)
    served: float = 0.0
    debt_s: float = 0.0
    uncommitted: deque[PendingCommit] = field(default_factory=deque)

    @property
    def model_id(self) -> str:
        return self.lease.model_id

    @property
    def reached(self) -> int:
        return self.applied + len(self.uncommitted)

    @property
    def is_due(self) -> bool:
        """True if there is something to commit now."""
        return bool(self.uncommitted) and self.uncommitted[0].op_result.done()

    def take_debt(self) -> float:
        debt, self.debt_s = self.debt_s, 0.0
        return debt

    def add_pending(self, pending: PendingCommit) -> None:
        """Records that the Op after `reached` ran and changed the state."""
        self.uncommitted.append(pending)
        # As in a replay: the reason that dooms an Op stays in the journal, whatever the text of its failure.
        failure = pending.entry.doomed or pending.failure
        self.accumulation = self.accumulation.after(pending.entry, failure)

    def committed(self) -> None:
        """Records that the first of the uncommitted Ops was committed."""
        self.applied = self.uncommitted.popleft().entry.seq


class Unrestorable(TinsmithError):
    """A model's snapshot or journal cannot be used. `lease` was acquired and released again. With `at_once`, further
    attempts would do harm."""

    def __init__(self, lease: Lease, why: str, *, at_once: bool = False) -> None:
        super().__init__(why)
        self.lease, self.at_once = lease, at_once


class Exhausted(TinsmithError):
    """The next Op must not begin again, because too many workers died while they ran it."""

    def __init__(self, lease: Lease, entry: Entry) -> None:
        super().__init__(f"{entry.request_id} was tried {entry.attempts} times")
        self.lease, self.entry = lease, entry


class NoMemoryToRestore(TinsmithError):
    """Memory ran out in a restore, which counts as an attempt of the model's next Op. `lease` was acquired and released
    again. The other states are sound."""

    def __init__(self, lease: Lease, why: str) -> None:
        super().__init__(why)
        self.lease = lease


class Broken(TinsmithError):
    """The backend raised an exception other than an OpError for these Ops: all of its states are suspect.

    `restored` is the lease of the model whose restore raised it, acquired and released again. Then there is no Op if
    none waits for the restore."""

    def __init__(self, why: str, *ops: tuple[Lease, int], restored: Lease | None = None) -> None:
        super().__init__(why)
        self.ops, self.restored = ops, restored


class Owner:
    """Acquires, keeps and releases the models of this worker.

    `restore(lease)` must bring the backend to the lease's applied seq, whatever was there before. `settle(resident,
    seconds)` saves a state before it is discarded, as far as it can in that time, so that restoring the model is quick.
    `lost(model id)` is called for each restore that its snapshot or journal failed.

    At most `most` models are held; `changed` is called when one is added or removed. `gpu_turn` waits until the trainer
    may use its GPUs, as long as its block.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        backend: TrainingBackend,
        keeper: LeaseKeeper,
        worker: str,
        restore: Callable[[Lease], GradAccumulation],
        settle: Callable[[Resident, float], None],
        most: int,
        changed: Callable[[], None],
        lost: Callable[[str], None],
        gpu_turn: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._oplog, self._backend, self._keeper = oplog, backend, keeper
        self._worker, self._restore, self._settle = worker, restore, settle
        self._most, self._changed, self._lost, self._gpu_turn = most, changed, lost, gpu_turn
        self._residents: dict[str, Resident] = {}
        self._restoring: Lease | None = None
        self._ending = False

    def residents(self) -> dict[str, Resident]:
        """The owned models by model id, the least recently used first."""
        residents = dict(self._residents)  # other threads may ask
        return dict(sorted(residents.items(), key=lambda item: item[1].used))

    def resident(self, model_id: str) -> Resident | None:
        return self._residents.get(model_id)

    def own(self, model_id: str) -> Resident | OwnedElsewhere:
        """Returns the model, restored if it is new here. Raises NotFound for an unknown model; Exhausted, Unrestorable,
        NoMemoryToRestore, Broken, Unavailable, NoTurnYet."""
        resident = self._residents.get(model_id)
        if resident is not None and self._keeper.holds(model_id):
            resident.used = time.monotonic()
            return resident
        self.discard(model_id)
        with self._gpu_turn():  # before the lease: waiting is no attempt, and keeps the model from no other trainer
            return self._acquired(model_id)

    def _acquired(self, model_id: str) -> Resident | OwnedElsewhere:
        asked = time.monotonic()
        lease = self._oplog.acquire(model_id, self._worker)
        if isinstance(lease, OwnedElsewhere):
            return lease
        self._keeper.add(model_id, asked)
        self._restoring = lease
        try:
            self._make_room()
            resident = Resident(lease, lease.applied, self._restored(lease))
        except BaseException:
            self.discard(model_id)
            raise
        finally:
            self._restoring = None
        resident.debt_s = time.monotonic() - asked
        telemetry.restored(ids.request_id(model_id, lease.applied + 1), resident.debt_s)
        self._residents[model_id] = resident
        self._count()
        log.info(
            "this worker owns the model now",
            extra={"model_id": model_id, "epoch": lease.epoch, "applied": lease.applied},
        )
        return resident

    def evict(self, model_id: str) -> None:
        """Settles and releases a model, so that it can be restored quickly here or elsewhere."""
        try:
            self.settle(model_id, _SETTLE_S)
        finally:
            self.discard(model_id)

    def begin(self, lease: Lease, seq: int) -> Entry | None:
        """Begins the Op at `seq`; None when it has not been admitted. See RedisOpLog.next. Raises Requeue in a worker
        that is about to end."""
        if self._ending:
            raise Requeue(f"seq {seq} of {lease.model_id} goes to another worker, because this one ends")
        self._keeper.put_offs.begin(ids.request_id(lease.model_id, seq))
        try:
            return self._oplog.next(lease, seq)
        except redis.RedisError:  # it may have begun
            self.put_off(lease, seq)
            raise

    def put_off(self, lease: Lease, seq: int) -> None:
        """Puts an Op back that was begun, at the latest when the state server can be reached again."""
        request_id = ids.request_id(lease.model_id, seq)
        self._keeper.put_offs.add(request_id, partial(self._oplog.put_off, lease, seq))

    def settle(self, model_id: str, seconds: float) -> None:
        """Saves a state, if that takes at most about `seconds`; the state itself does not change."""
        resident = self._residents.get(model_id)
        if resident is not None and self._keeper.holds(model_id):
            self._settle(resident, seconds)

    def discard(self, model_id: str) -> None:
        """Discards a state; the journal restores it when the model is requested again."""
        known = self._residents.pop(model_id, None)
        try:
            self._backend.close(model_id)
        finally:
            self._release(model_id, known)
        if known:
            self._count()

    def discard_all(self) -> None:
        for model_id in list(self._residents):
            self.discard(model_id)

    def release_all(self) -> None:
        """Releases every lease and leaves the states as they are, for a process that ends."""
        for model_id, resident in list(self._residents.items()):
            self._release(model_id, resident)

    def hand_back(self) -> None:
        """Puts back every Op that runs here, for a process that ends before they do. Begins no further one. May be
        called from any thread. Raises RedisError while the state server is away."""
        self._ending = True
        for resident in list(self._residents.values()):
            for seq in range(resident.applied + 1, resident.reached + 2):
                self._oplog.put_off(resident.lease, seq)
        restoring = self._restoring
        if restoring is not None:
            self._oplog.put_off(restoring, restoring.applied + 1)
            self._oplog.end_restore(restoring)
            self._oplog.release(restoring.model_id, self._worker)

    def _release(self, model_id: str, resident: Resident | None) -> None:
        """Releases the lease. Leaves uncommitted Ops to the next owner and counts no attempt for them, as this process
        lives."""
        if resident is not None:
            for pending in list(resident.uncommitted):
                telemetry.op_abandoned(pending.entry.request_id, "the model's state was discarded")
                self.put_off(resident.lease, pending.entry.seq)
        with contextlib.suppress(redis.RedisError):  # it lapses by itself
            if self._keeper.holds(model_id):
                self._oplog.release(model_id, self._worker)
        self._keeper.drop(model_id)

    def _make_room(self) -> None:
        for model_id in list(self.residents())[: max(0, len(self._residents) - self._most + 1)]:
            self.evict(model_id)

    def _restored(self, lease: Lease) -> GradAccumulation:
        """Restores the model. A death during the restore counts as an attempt of the next Op; otherwise a replay that
        kills its worker would repeat forever. A later death counts once the Op begins: other Ops may run before it."""
        entry = self.begin(lease, lease.applied + 1)
        if entry is not None and not entry.doomed and ops.is_newer(entry.payload):
            self.put_off(lease, entry.seq)
            raise NewerContent(f"{entry.request_id} was written by a newer version of Tinsmith")
        if entry is not None and entry.attempts >= MAX_ATTEMPTS:
            if entry.in_doubt:
                self.put_off(lease, entry.seq)
                raise Unavailable(f"{entry.request_id}: a worker that tried it may still commit it")
            raise Exhausted(lease, entry)
        try:
            restored = self._restore_once_more(lease)
        except NoMemory as error:
            self._oplog.strike(lease, lease.applied + 1)
            raise NoMemoryToRestore(lease, f"{lease.model_id} cannot be restored now: {error}") from error
        except (NotFound, OpError) as error:
            self.put_off(lease, lease.applied + 1)
            if self._oplog.acquire(lease.model_id, self._worker) != lease:
                # A snapshot that a new owner or our own upload replaced meanwhile is gone, but the model is not lost.
                raise Fenced(f"another worker continued {lease.model_id} during the restore: {error}") from error
            self._lost(lease.model_id)
            raise Unrestorable(lease, f"{lease.model_id} cannot be restored: {error}") from error
        except Unrestorable:
            self.put_off(lease, lease.applied + 1)
            self._count_lost(lease)
            raise
        except (Fenced, Unavailable, redis.RedisError):
            self.put_off(lease, lease.applied + 1)
            raise
        except Exception as error:
            self._count_lost(lease)
            waiting = [] if entry is None else [(lease, entry.seq)]
            why = f"restoring {lease.model_id} broke the backend"
            log.exception(why)
            raise Broken(why, *waiting, restored=lease) from error
        self.put_off(lease, lease.applied + 1)
        return restored

    def _count_lost(self, lease: Lease) -> None:
        """Reports a failed restore, unless another worker continued the model. Raises nothing: an error would hide that
        of the restore."""
        with contextlib.suppress(redis.RedisError, Unavailable):
            if self._oplog.acquire(lease.model_id, self._worker) == lease:
                self._lost(lease.model_id)

    def _restore_once_more(self, lease: Lease) -> GradAccumulation:
        """Restores the model, unless that ended too many workers. Otherwise each of the model's Ops would end three."""
        put_offs, id_ = self._keeper.put_offs, f"restore of {lease.model_id}"
        put_offs.begin(id_)
        try:
            deaths, in_doubt = self._oplog.begin_restore(lease)
            if deaths >= MAX_ATTEMPTS:
                raise _unsafe(lease, in_doubt=in_doubt)
            restored = self._restore(lease)
        except Exception as error:
            # What the backend survives is an attempt of the next Op. Anything else ends this process.
            broke = not isinstance(error, (TinsmithError, redis.RedisError)) and not self._backend.healthy()
            put_offs.add(id_, partial(self._oplog.end_restore, lease, broke=broke))
            raise
        put_offs.add(id_, partial(self._oplog.end_restore, lease, restored=True))
        return restored

    def _count(self) -> None:
        telemetry.MODELS.set(len(self._residents))
        self._changed()


def _unsafe(lease: Lease, *, in_doubt: bool) -> TinsmithError:
    """The error for a model whose restore ended too many workers."""
    if in_doubt:
        return Unavailable(f"a worker that was restoring {lease.model_id} may still be alive without a connection")
    return Unrestorable(
        lease,
        f"{lease.model_id} cannot be restored: {MAX_ATTEMPTS} workers ended while they restored it, and no call of it "
        "runs for an hour after the first of them; create a new model from one of the run's checkpoints, or let the "
        "operator give the trainer more memory or a newer version, and go on after the hour",
        at_once=True,
    )


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A pending commit: an Op that ran and is not committed yet. `op_result` is not done while a save is being written.

    `run_s`: seconds for which this Op and the other `ops_in_pass` - 1 Ops of its pass kept everything else waiting.
    `device_ms`: its share of that time, on each device of the trainer together.
    """

    entry: Entry
    op_result: Future[OpResult]
    run_s: float
    ops_in_pass: int
    device_ms: int

    @property
    def failure(self) -> str:
        """The failure text; empty for success, and while a save is being written."""
        is_written = self.op_result.done() and self.op_result.exception() is None
        return self.op_result.result().failure if is_written else ""
