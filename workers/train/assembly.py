"""Assembles a trainer around its open backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from app import dispatch
from app.services.base_models import trainer_role
from app.settings import TrainerSettings
from app.stores.disk import Disk
from workers.backends.training.base import TrainingBackend
from workers.checkpoints.coalescing import CoalescingWorker, MakeWorker
from workers.checkpoints.shm_transfer import ShmTransfers
from workers.checkpoints.snapshot_upload import SnapshotFolder
from workers.checkpoints.snapshots import Restore, Snapshots
from workers.checkpoints.writer import Saver
from workers.process import telemetry
from workers.process.fair_queue import FairQueue, ProjectWeights
from workers.process.liveness import Heartbeat, Watchdog
from workers.process.parts import Parts, Serving, create_heartbeat, create_maintenance, create_watchdog
from workers.process.runtime import Runtime, exit_on_hang, exit_process
from workers.train.committer import BackgroundSaves, Committer
from workers.train.executor import Executor
from workers.train.owner import Owner
from workers.train.rebalance import Drain, IdleEviction, Rebalancer
from workers.train.runner import TrainingRunner
from workers.train.scheduler import BacklogScan, RetryBackoff, RunAhead, Scheduler

_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Overrides:
    """The parts of a trainer that tests replace. The defaults are production's.

    `end` ends the process. `make_worker` starts a background thread. A model rests for `rest_s` between two snapshots.
    The backlog scan takes at most `scan_share` of the time.
    """

    end: Callable[[str], NoReturn] = exit_process
    background_saves: Callable[[], BackgroundSaves] = BackgroundSaves
    make_worker: MakeWorker = CoalescingWorker
    rest_s: float = 10.0
    scan_share: float = 0.01


_REAL = Overrides()


@dataclass(frozen=True)
class AssembledTrainer:
    """An assembled trainer."""

    parts: Parts
    serving: Serving[TrainingBackend]
    watchdog: Watchdog
    heartbeat: Heartbeat
    shm_transfers: ShmTransfers
    snapshots: Snapshots
    owner: Owner
    drain: Drain
    retry_backoff: RetryBackoff
    runner: TrainingRunner
    rebalancer: Rebalancer
    idle_eviction: IdleEviction
    end: Callable[[str], NoReturn]
    closing: threading.Event = field(default_factory=threading.Event, kw_only=True)

    def runtime(self) -> Runtime:
        return Runtime(
            handler=self.runner,
            shared=self.rebalancer,
            queue=self.serving.queue,
            heartbeat=self.heartbeat,
            watchdog=self.watchdog,
            maintenance=create_maintenance(self.parts),
            on_tick=self.on_tick,
            close=self.close,
            leave=self.runner.leave,
            hand_back=self.hand_back,
        )

    def hand_back(self) -> None:
        """Gives the running Op and all models to other trainers, from any thread.

        Ends the process at the cost of an attempt if the backend has failed: the launcher of several ranks also sends
        SIGTERM when one of them has died, perhaps of the running Op.
        """
        if not self.closing.is_set() and not self.serving.backend.healthy():
            self.end("the backend failed; another rank may have died")
        self.owner.hand_back()
        self.drain.release()

    def on_tick(self) -> None:
        with self.watchdog.working():
            self.runner.commit_saves()
            self.retry_backoff.retry_due()
            self.idle_eviction()

    def close(self) -> None:
        self.closing.set()  # the other ranks end with the backend
        self.drain.settle_and_release(_SETTLE_S)
        self.shm_transfers.close()
        self.snapshots.close()
        self.serving.backend.shutdown()
        self.parts.keeper.stop()


def assemble_trainer(parts: Parts, serving: Serving[TrainingBackend], overrides: Overrides = _REAL) -> AssembledTrainer:
    """Assembles a trainer around its open backend."""
    oplog, send, queue, backend = parts.oplog, parts.dispatcher.send, serving.queue, serving.backend
    executor, snapshots, restore = _storage(parts, backend, overrides)
    shm_transfers = executor.saver.shm_transfers

    def end(why: str) -> NoReturn:
        with exit_on_hang():
            drain.release()
        overrides.end(why)

    watchdog = create_watchdog(parts, serving, end)
    heartbeat = create_heartbeat(parts, serving, trainer_role(full=serving.full), watchdog)
    owner = Owner(
        oplog=oplog,
        backend=backend,
        keeper=parts.keeper,
        worker=parts.worker,
        restore=restore,
        settle=lambda resident, seconds: committer.settle(resident, seconds),
        most=serving.base.trainer.max_models,
        changed=heartbeat.refresh,
        lost=shm_transfers.not_restored,
        gpu_turn=serving.gpu_turn_soon,
    )
    telemetry.SNAPSHOT_AGE.set_function(lambda: snapshots.age_s(owner.residents()))
    drain = Drain(oplog, owner, send, queue)
    retry_backoff = RetryBackoff(send, dispatch.direct_queue(queue, parts.node))
    background_saves = overrides.background_saves()
    committer = Committer(oplog, owner, executor, snapshots, background_saves, serving.base.trainer.gpus_needed)
    runner = TrainingRunner(
        oplog=oplog,
        owner=owner,
        committer=committer,
        healthy=backend.healthy,
        retry_backoff=retry_backoff,
        scheduler=_scheduler(parts, serving, owner, RunAhead(background_saves, retry_backoff), overrides.scan_share),
        background_saves=background_saves,
        send=send,
        queue=queue,
        end=end,
        gpu_turn=serving.gpu_turn_soon,
        has_gpu_turn=serving.has_gpu_turn,
    )
    return AssembledTrainer(
        parts=parts,
        serving=serving,
        watchdog=watchdog,
        heartbeat=heartbeat,
        shm_transfers=shm_transfers,
        snapshots=snapshots,
        owner=owner,
        drain=drain,
        retry_backoff=retry_backoff,
        runner=runner,
        rebalancer=Rebalancer(runner, owner, parts.records, send, serving.base.name, parts.node, full=serving.full),
        idle_eviction=IdleEviction(owner, parts.lifecycle.unwanted, parts.settings.engine.idle_s, shm_transfers.lost),
        end=end,
    )


def _storage(parts: Parts, backend: TrainingBackend, overrides: Overrides) -> tuple[Executor, Snapshots, Restore]:
    shm_transfers = ShmTransfers(parts.store, parts.records, parts.shm_folder, overrides.make_worker)
    shm_transfers.begin()
    cache, least_free = parts.fresh_cache_folder(), parts.settings.engine.free_disk_bytes
    scratch = Disk("the saves", cache / "saves", least_free)
    saver = Saver(backend, parts.records, parts.store, shm_transfers, parts.limits.checkpoint_ttl_s, scratch)
    executor = Executor(backend, parts.store, Disk("the fetched checkpoints", cache / "fetched", least_free), saver)
    folder = SnapshotFolder(parts.settings.data_dir / "snapshots", parts.node, least_free)
    snapshots = Snapshots(parts.oplog, saver, folder, parts.settings.engine, overrides.rest_s, overrides.make_worker)
    return executor, snapshots, Restore(parts.oplog, executor, folder, snapshots)


def _scheduler(
    parts: Parts, serving: Serving[TrainingBackend], owner: Owner, run_ahead: RunAhead, scan_share: float
) -> Scheduler:
    trainer = serving.base.trainer
    return Scheduler(
        oplog=parts.oplog,
        owner=owner,
        run_ahead=run_ahead,
        fair_queue=FairQueue(ProjectWeights(parts.limits)),
        backlog_scan=BacklogScan(parts.oplog, serving.queue, scan_share),
        merged_tokens=_merged_tokens(trainer, serving.backend.describe()),
        wait_s=trainer.merge_wait_s,
    )


def _merged_tokens(trainer: TrainerSettings, facts: Mapping[str, Any]) -> int:
    """Returns the most tokens that other Ops may add to a pass; 0 for an exact trainer. A GPU promises no bits, and
    small passes leave most of it idle."""
    exact = set(facts["devices"]) == {"cpu"} if trainer.exact == "auto" else trainer.exact
    most = max(8192, facts["micro_batch_tokens"]) if trainer.merged_tokens == "auto" else trainer.merged_tokens
    return 0 if exact else most
