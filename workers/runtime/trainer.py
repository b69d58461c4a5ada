"""Puts a trainer together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from app import doorbell
from app.services.base_models import trainer_role
from app.services.limits import LimitsOf
from app.settings import BaseModelSettings, Settings, TrainerSettings
from workers import telemetry
from workers.ahead import Ahead
from workers.committer import Committer
from workers.drain import Drain
from workers.executor import Executor
from workers.handover.sending import Handovers
from workers.health.presence import Presence
from workers.health.pulse import Pulse
from workers.owner import Owner, Resident
from workers.parked import Parked
from workers.runner import TrainingRunner
from workers.runtime.parts import Parts, empty_cache, handover_folder, sweeper
from workers.runtime.running import Runtime, end_in_any_case, exit_process
from workers.saves import Saves
from workers.saving import Saver
from workers.shares import Shares
from workers.snapshots.folder import SnapshotFolder
from workers.snapshots.restore import Restore
from workers.snapshots.schedule import Snapshots
from workers.spread import Spread
from workers.tidying import Tidying
from workers.turns import Turns
from workers.unowned import Unowned
from workers.weights import Weights

_SETTLE_S = 5.0


def make(
    settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str, *, full: bool = False
) -> Runtime:
    from workers.training.factory import create

    base = base.for_full() if full else base
    backend = create(base, full=full)
    info = backend.open()
    handovers = Handovers(parts.store, parts.records, handover_folder(settings))
    handovers.begin()
    saver = Saver(backend, parts.records, parts.store, handovers)
    cache = empty_cache(settings, node_name)
    executor = Executor(backend, parts.store, cache, saver)
    folder = SnapshotFolder(settings.data_dir / "snapshots", node_name)
    snapshots = Snapshots(parts.oplog, saver, folder, settings.engine)
    restore = Restore(parts.oplog, executor, folder, snapshots)
    direct, ring = doorbell.direct_queue(queue, node_name), parts.doorbell.ring

    def end(why: str) -> NoReturn:
        with end_in_any_case():
            drain.hand_over()
        exit_process(why)

    def settle(resident: Resident, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        committer.finish(resident, seconds)
        # A store that hangs leaves time for the snapshot on the disk.
        handovers.finish(resident.lease.model_id, max(0.0, deadline - time.monotonic()) / 2)
        snapshots.settle(resident, within_s=max(0.0, deadline - time.monotonic()))

    pulse = Pulse(doorbell.TickBell(parts.celery, direct), backend.healthy, settings.engine.healthy_s, end)
    metrics, role = telemetry.serve_metrics(base.trainer.metrics_port), trainer_role(full=full)
    presence = Presence(parts.records, node_name, role, info, backend.describe, metrics, pulse.healthy, queue)
    most = base.trainer.max_models
    owner = Owner(
        parts.oplog,
        backend,
        parts.keeper,
        parts.worker,
        restore,
        settle,
        most,
        presence.refresh,
        handovers.give_up,
    )
    drain = Drain(parts.oplog, owner, ring, queue)
    parked = Parked(ring, direct)
    merged_tokens = _merged_tokens(base.trainer, backend.describe()["devices"])
    saves = Saves()
    ahead, wait_s = Ahead(saves, parked), base.trainer.merge_wait_s
    shares = Shares(Weights(LimitsOf(parts.records, settings.limits.project)))
    turns = Turns(parts.oplog, owner, ahead, shares, Unowned(parts.oplog, queue), merged_tokens, wait_s)
    committer = Committer(parts.oplog, owner, executor, snapshots, saves)
    runner = TrainingRunner(parts.oplog, owner, committer, backend.healthy, parked, turns, saves, ring, queue, end)
    spread = Spread(runner, owner, parts.records, ring, base.name, node_name, full=full)
    tidying = Tidying(owner, parked, parts.lifecycle.unwanted, settings.engine.idle_s, handovers.lost)

    def tidy() -> None:
        with pulse.working():
            runner.see_to_saves()
            tidying()

    def close() -> None:
        drain.in_order(_SETTLE_S)
        handovers.close()
        snapshots.close()
        backend.shutdown()
        parts.keeper.stop()

    return Runtime(runner, spread, queue, presence, pulse, sweeper(settings, parts), tidy, close, runner.leave)


def _merged_tokens(trainer: TrainerSettings, devices: Sequence[str]) -> int:
    """A GPU promises no bits, and small passes leave most of it idle."""
    exact = set(devices) == {"cpu"} if trainer.exact == "auto" else trainer.exact
    return 0 if exact else trainer.merged_tokens
