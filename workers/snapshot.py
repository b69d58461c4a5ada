"""Durable snapshots of a model, taken where its state is smallest: right after an optim_step, when gradients are zero.

They bound how much of a journal a new owner replays, and let the journal be trimmed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from app.domain import codec
from app.domain.ops import CreateModel, LoadWeights, OptimStep
from app.errors import Fenced, Unavailable
from app.stores.interfaces import Entry, Lease, OpLog
from app.stores.objects.removal import remove_checkpoint
from workers.executor import Executor
from workers.owner import Resident
from workers.saving import Saver
from workers.window import Window

log = logging.getLogger(__name__)


@dataclass
class Snapshots:
    """Spends at most `share` of the time on snapshots: one that took c seconds is followed by c / share without.

    A load is snapshotted at once: its checkpoint may be deleted, so a replay must not need it.
    """

    oplog: OpLog
    saver: Saver
    share: float
    first_s: float = 30.0
    """A young run replays faster than it would snapshot."""
    _next: dict[str, float] = field(default_factory=dict)

    def after(self, resident: Resident, entry: Entry, *, failed: bool) -> None:
        """Called after every commit. A snapshot that cannot be stored is tried again later. Raises Fenced."""
        started = time.monotonic()
        due = started >= self._next.setdefault(resident.lease.model_id, started + self.first_s)
        if failed or not (_is_load(entry) or (due and entry.kind == OptimStep.kind)):
            return
        try:
            self._take(resident.lease, entry.seq)
        except (Unavailable, OSError) as error:
            log.warning("no snapshot: %s", error, extra={"model_id": resident.lease.model_id})
        now = time.monotonic()
        self._next[resident.lease.model_id] = now + (now - started) / self.share

    def _take(self, lease: Lease, seq: int) -> None:
        prefix = self.saver.snapshot(lease, seq)
        replaced = self.oplog.set_snapshot(lease, seq, prefix)
        if replaced and replaced != prefix:
            remove_checkpoint(self.saver.store, replaced)


def _is_load(entry: Entry) -> bool:
    if entry.kind == CreateModel.kind:
        return codec.decode(entry.payload).source is not None
    return entry.kind == LoadWeights.kind


@dataclass(frozen=True, slots=True)
class Restore:
    """Rebuilds a model at its applied seq: newest snapshot, then the journal behind it, silently."""

    oplog: OpLog
    executor: Executor

    def __call__(self, lease: Lease) -> Window:
        """A snapshot stands right behind an optim_step or a load, where the window is empty. Raises Fenced."""
        window = Window()
        if lease.snapshot:
            self.executor.restore(lease.model_id, lease.snapshot)
        for seq in range(lease.snapshot_seq + 1, lease.applied + 1):
            entry = self.oplog.entry(lease.model_id, seq)
            if entry is None:
                raise Fenced(f"{lease.model_id} seq {seq} is no longer in the journal: another owner moved on")
            self.executor.replay(lease, entry)
            window = window.after(entry, entry.doomed)
        return window
