"""Bringing a model back: its newest snapshot, here or in the object store, and then the journal behind it, silently."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from app.errors import Fenced, OpError
from app.stores.interfaces import Lease, OpLog
from workers.executor import Executor
from workers.snapshots.folder import Local, SnapshotFolder
from workers.snapshots.schedule import Snapshots
from workers.window import Window

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restore:
    """Rebuilds a model at its applied seq."""

    oplog: OpLog
    executor: Executor
    folder: SnapshotFolder
    snapshots: Snapshots

    def __call__(self, lease: Lease) -> Window:
        """A snapshot stands where the window is empty. Raises Fenced, Unavailable; NotFound and OpError when it or the
        journal behind it is lost.

        It stands before what was handed over and got lost, if anything did, so that the replay comes past it.
        """
        handovers = self.executor.saver.handovers
        to_make = handovers.resume(lease.model_id)
        local = self._from_this_machine(lease, min(to_make, default=lease.applied + 1))
        if local is None and lease.snapshot:
            self.executor.restore(lease.model_id, lease.snapshot)
        self.snapshots.begin(lease, local)
        window = Window()
        for seq in range((local.seq if local else lease.snapshot_seq) + 1, lease.applied + 1):
            entry = self.oplog.entry(lease.model_id, seq)
            if entry is None:
                raise Fenced(f"{lease.model_id} seq {seq} is no longer in the journal: another owner moved on")
            self.executor.replay(lease, entry)
            if seq in to_make:
                self.executor.saver.save_again(lease, to_make[seq])
            self.snapshots.replayed(lease.model_id, entry)
            window = window.after(entry, entry.doomed)
        handovers.send(lease.model_id)
        return window

    def _from_this_machine(self, lease: Lease, before: int) -> Local | None:
        for local, manifest in self.folder.usable(lease):
            if local.seq >= before:
                continue
            try:
                self.executor.restore_from(lease.model_id, local.path, manifest)
            except OpError as error:
                log.warning("a local snapshot cannot be loaded: %s", error, extra={"model_id": lease.model_id})
                self.folder.remove(local)
            else:
                return local
        return None
