"""Takes snapshots of models, mostly after an optim_step, when gradients are zero, and restores models from them.

Snapshots limit how much of a journal a new owner replays, and let the journal be trimmed. A snapshot delays a step only
by a copy of the state; snapshot_upload.py does the rest.

A model is restored from its newest snapshot, here or in the object store, and then from the journal after it, which is
replayed without answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import redis

from app.domain import ops, records
from app.domain.checkpoints import WINDOW
from app.domain.ops import FORWARD, FORWARD_BACKWARD, CreateModel, LoadWeights, OptimStep, SaveWeights
from app.domain.records import READS_GRADIENTS, Worker
from app.errors import Fenced, NoMemory, OpError
from app.services.base_models import TRAINER_ROLES
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import load
from app.stores.redis.types import Entry, Lease
from workers.backends.training.base import Writer
from workers.checkpoints.coalescing import MakeWorker
from workers.checkpoints.snapshot_upload import LocalSnapshot, SnapshotCopy, SnapshotFolder, SnapshotPipeline
from workers.checkpoints.writer import Saver
from workers.process import telemetry
from workers.train.executor import Executor, GradAccumulation
from workers.train.owner import Resident

log = logging.getLogger(__name__)
# A new owner reads this many Ops in about a second, also if it need not run them again.
_MOST_OPS = 1_000
# A new owner runs this many passes again. A batch of 128 datums a call has fewer calls a step.
_MOST_PASSES = 64


@dataclass(slots=True)
class Track:
    """One model since it was restored here. `total`, `taken` and `durable` count payload bytes of the journal: all
    until now, those until the newest snapshot, and those until the newest durable one. Both times are
    monotonic: until `next` no snapshot is taken that can wait, and `used` is that of the last Op that succeeded."""

    next: float
    used: float
    total: int = 0
    taken: int = 0
    durable: int = 0
    unsaved: bool = False
    """The weights have changed since the newest snapshot."""
    ops: int = 0
    passes: int = 0
    """The Ops in the journal behind the newest snapshot, and those of them that a replay runs as passes."""
    changed: float = math.inf
    """Time (monotonic) of the first change that no snapshot has; infinite if there is none."""
    in_flight: deque[tuple[int, float]] = field(default_factory=deque)
    """The mark and the time of the first change of each snapshot that is not durable yet, oldest first. The op thread
    appends, and the upload thread removes."""

    @classmethod
    def begun(cls, rest_s: float) -> Track:
        now = time.monotonic()
        return cls(now + rest_s, now)

    @property
    def is_durable(self) -> bool:
        return not self.unsaved and self.durable == self.taken

    def made_durable(self, mark: int) -> None:
        self.durable = mark
        while self.in_flight and self.in_flight[0][0] <= mark:
            self.in_flight.popleft()

    def age_s(self) -> float:
        """Seconds for which a change has been in no durable snapshot; 0 if all are."""
        changed = self.changed  # read first: a change in no snapshot may get into one meanwhile
        with contextlib.suppress(IndexError):
            changed = min(changed, self.in_flight[0][1])
        return max(0.0, time.monotonic() - changed)

    def add(self, entry: Entry) -> None:
        """Records an Op that succeeded; its entry stays in the journal until it is trimmed."""
        self.used = time.monotonic()
        if entry.kind not in (FORWARD, SaveWeights.kind):
            self.total += len(entry.payload)
        self.passes += entry.kind == FORWARD_BACKWARD
        if entry.kind == OptimStep.kind or _is_load(entry):
            self.unsaved, self.changed = True, min(self.changed, self.used)


class Snapshots:
    """Takes snapshots and makes them durable.

    Copies take at most `snapshot_share` of the time: after a copy of c seconds the next one waits for c / share, and
    for at least `rest_s`, as a shorter replay is not worth a snapshot. No snapshot is taken while another one of the
    model waits for the disk.

    Within these limits, one is also taken after another Op than an optim_step when there are `_MOST_OPS` Ops or
    `_MOST_PASSES` passes behind the newest: a model that never takes a step would otherwise keep all of them, and run
    them again in each restore. It holds the pending gradients and their window, so it waits while a trainer of an
    earlier version lives.

    Regardless of these limits, a load is followed by a snapshot at once, since its checkpoint may be deleted and a
    replay must not need it. If the journal has grown by more than `journal_bytes` since the last snapshot, the next Op
    that allows one is also followed by one at once.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        saver: Saver,
        folder: SnapshotFolder,
        settings: EngineSettings,
        rest_s: float,
        make_worker: MakeWorker,
    ) -> None:
        self._saver, self._folder = saver, folder
        self._share, self._journal_bytes, self._rest_s = settings.snapshot_share, settings.journal_bytes, rest_s
        self._tracks: dict[str, Track] = {}
        # The owner evicts a model after `idle_s`. If it did not, only a copy is removed here.
        self._unused_s = 2 * settings.idle_s
        self._pipeline = SnapshotPipeline(oplog, saver, folder, self.clear, make_worker)

    def begin(self, lease: Lease, local: LocalSnapshot | None) -> None:
        """Starts a track for a model that is being restored, from `local` if there is one; the replayed Ops come
        next."""
        track = self._tracks[lease.model_id] = Track.begun(self._rest_s)
        if local is not None and local.seq > lease.snapshot_seq:
            track.durable = -1
            track.in_flight.append((0, time.monotonic()))
            self._pipeline.resume(lease, local, partial(track.made_durable, 0))

    def replayed(self, model_id: str, entry: Entry) -> None:
        """Counts an Op that a restore has run again. Takes no snapshot."""
        telemetry.REPLAYED.inc()
        self._track(model_id).ops += 1
        if not entry.doomed:
            self._track(model_id).add(entry)

    def after(self, resident: Resident, entry: Entry, *, failed: bool) -> None:
        """Counts an Op and takes a snapshot if one is due. Called after every commit, on the op thread.

        A state that ran ahead of its commits is not the state after `entry`: the snapshot waits for the next step.
        """
        model_id = resident.model_id
        track = self._track(model_id)
        track.ops += 1
        if not failed:
            track.add(entry)
        if _is_load(entry) and not failed:
            self._take(resident, track, at_once=True)
        elif not resident.uncommitted and self._is_due(resident, track, entry, failed=failed):
            self._take(resident, track, at_once=track.total - track.durable > self._journal_bytes)

    def _is_due(self, resident: Resident, track: Track, entry: Entry, *, failed: bool) -> bool:
        stepped = entry.kind == OptimStep.kind and not failed
        if not stepped and track.ops < _MOST_OPS and track.passes < _MOST_PASSES:
            return False
        is_long = track.total - track.taken > self._journal_bytes
        if not is_long and (time.monotonic() < track.next or not self._pipeline.ready(resident.model_id)):
            return False
        return resident.accumulation == GradAccumulation() or self._all_read_gradients()

    def _all_read_gradients(self) -> bool:
        """True if every live trainer restores pending gradients. One of an earlier version would fail the calls of such
        a model; it replays the passes instead."""
        try:
            workers = [load(Worker, stored) for _, stored in self._saver.records.list(Worker.namespace)]
        except redis.RedisError:
            return False
        return all(READS_GRADIENTS in worker.describe for worker in workers if worker.role in TRAINER_ROLES)

    def settle(self, resident: Resident, *, within_s: float) -> None:
        """Makes the model's state durable before it is discarded, as far as about `within_s` seconds allow.

        Nothing depends on it: without it, the next owner replays more. Unfinished work continues in the background.
        No snapshot is taken while few gradients are pending, which are quickly replayed, or Ops ran ahead of their
        commit.
        """
        model_id = resident.model_id
        track = self._track(model_id)
        if track.unsaved and resident.accumulation == GradAccumulation() and not resident.uncommitted:
            self._take(resident, track, at_once=True)
        self._pipeline.finish(model_id, within_s)

    def age_s(self, models: Iterable[str]) -> float:
        """The longest time for which a change of one of these models has been in no durable snapshot, in seconds. May
        be called from any thread."""
        tracks = map(self._tracks.get, models)
        return max((track.age_s() for track in tracks if track is not None), default=0.0)

    def forget(self, model_id: str) -> None:
        """Removes everything kept here of a deleted model."""
        self._tracks.pop(model_id, None)
        self._pipeline.drop(model_id)
        self._folder.forget(model_id)

    def clear(self) -> None:
        """Removes from this machine's disk the deleted models, the snapshots behind the durable one, and the copies of
        the durable ones of models long unused."""
        for model_id in self._folder.models():
            model = self._saver.records.get(records.Model.namespace, model_id)
            if model is None or model.get("ended"):
                self.forget(model_id)
                continue
            # Without a track, it is a model of an earlier process, or of another trainer that may share the disk.
            unused_s = math.inf if model_id in self._tracks else self._unused_s
            self._folder.clear(model_id, int(model["snapshot_seq"]), unused_s)
        unused = time.monotonic() - self._unused_s
        for model_id, track in list(self._tracks.items()):
            if track.used < unused and track.is_durable:
                del self._tracks[model_id]

    def close(self) -> None:
        """Ends the threads after their current work, if that is soon; the next start continues with the files on
        disk."""
        self._pipeline.close()

    def _track(self, model_id: str) -> Track:
        return self._tracks.setdefault(model_id, Track.begun(self._rest_s))

    def _take(self, resident: Resident, track: Track, *, at_once: bool) -> None:
        model_id = resident.model_id
        started = time.monotonic()
        try:
            write = self._saver.backend.capture(model_id, optimizer=True, gradients=True)
        except Exception:
            # Training continues without the snapshot; if the error broke the backend, the backend reports it (healthy).
            log.exception("no snapshot could be taken", extra={"model_id": model_id})
            track.next = started + self._rest_s
            return
        now = time.monotonic()
        track.next = now + max(self._rest_s, (now - started) / self._share)
        if track.unsaved:
            track.in_flight.append((track.total, track.changed))
        track.taken, track.unsaved, track.ops, track.passes = track.total, False, 0, 0
        track.changed = math.inf
        durable = partial(track.made_durable, track.total)
        write = _with_accumulation(write, resident.accumulation)
        self._pipeline.put(SnapshotCopy(resident.lease, resident.applied, write, durable, at_once))


def _with_accumulation(write: Writer, accumulation: GradAccumulation) -> Writer:
    def write_both(folder: Path) -> None:
        write(folder)
        (folder / WINDOW).write_text(json.dumps(asdict(accumulation)))

    return write if accumulation == GradAccumulation() else Writer(write_both, write.size)


def _is_load(entry: Entry) -> bool:
    if entry.kind == CreateModel.kind:
        return ops.decode(entry.payload).source is not None
    return entry.kind == LoadWeights.kind


@dataclass(frozen=True, slots=True)
class Restore:
    """Rebuilds a model at its applied seq."""

    oplog: RedisOpLog
    executor: Executor
    folder: SnapshotFolder
    snapshots: Snapshots

    def __call__(self, lease: Lease) -> GradAccumulation:
        """Restores the model and returns its accumulation. Raises Fenced, Unavailable, NoMemory; NotFound and another
        OpError when the snapshot or the journal after it is lost.

        If a transferred adapter was lost, the restore starts from a snapshot before it, so that the replay rebuilds it.
        """
        shm_transfers = self.executor.saver.shm_transfers
        to_make = shm_transfers.resume(lease.model_id)
        local, accumulation = self._from_this_machine(lease, min(to_make, default=lease.applied + 1))
        if local is None and lease.snapshot:
            accumulation = self.executor.restore(lease.model_id, lease.snapshot)
        self.snapshots.begin(lease, local)
        for entry in self._behind(lease, local.seq if local else lease.snapshot_seq):
            self.executor.replay(lease, entry)
            if entry.seq in to_make:
                self.executor.saver.save_again(lease, to_make[entry.seq])
            self.snapshots.replayed(lease.model_id, entry)
            accumulation = accumulation.after(entry, entry.doomed)
        shm_transfers.restored(lease.model_id)
        return accumulation

    def _behind(self, lease: Lease, seq: int) -> Iterator[Entry]:
        """The applied Ops behind a snapshot at `seq`, read a handful at a time."""
        while seq < lease.applied:
            found = self.oplog.entries(lease.model_id, range(seq + 1, lease.applied + 1))
            if not found:
                raise Fenced(
                    f"{lease.model_id} seq {seq + 1} is no longer in the journal: another owner has continued the run"
                )
            yield from found
            seq = found[-1].seq

    def _from_this_machine(self, lease: Lease, before: int) -> tuple[LocalSnapshot | None, GradAccumulation]:
        for local, manifest in self.folder.usable(lease):
            if local.seq >= before:
                continue
            try:
                accumulation = self.executor.restore_from(lease.model_id, local.path, manifest)
            except NoMemory:  # the next snapshot would not fit either
                raise
            except OpError as error:
                log.warning("a local snapshot cannot be loaded: %s", error, extra={"model_id": lease.model_id})
                self.folder.remove(local)
            else:
                return local, accumulation
        return None, GradAccumulation()
