"""Assembles a sampler around its open backend."""

from __future__ import annotations

from dataclasses import dataclass

from app import dispatch, ids
from app.domain.checkpoints import CheckpointPrefix
from app.services.base_models import sampler_role, trainer_role
from app.stores.disk import Disk
from app.stores.objects.routes import RouteFiles
from app.stores.redis import keys
from app.stores.redis.client import Channel, connect_state
from workers.backends.sampling.base import SamplerBackend
from workers.process.fair_queue import FairQueue, ProjectWeights
from workers.process.parts import Parts, Serving, create_heartbeat, create_maintenance, create_watchdog
from workers.process.runtime import Runtime, exit_process
from workers.sample.adapter_files import AdapterFiles
from workers.sample.adapters import Adapters, AdapterScheduler
from workers.sample.admission import BatchAdmission, ThrottledDispatch
from workers.sample.device_time import DeviceClock
from workers.sample.probe import Probe
from workers.sample.runner import RunningRequests, SampleRunner
from workers.sample.token_stream import TokenPublisher


@dataclass(frozen=True, slots=True)
class AssembledSampler:
    """An assembled sampler. `cancellations` reports the requests that were cancelled."""

    parts: Parts
    runner: SampleRunner
    cancellations: Channel
    runtime: Runtime


def assemble_sampler(
    parts: Parts, serving: Serving[SamplerBackend], cancelled: str = keys.ABORTED_CHANNEL
) -> AssembledSampler:
    """Assembles a sampler around its open backend. It hears of cancelled requests on the channel `cancelled`."""
    oplog, queue, backend, sampler = parts.oplog, serving.queue, serving.backend, serving.base.sampler
    fair_queue, running_requests, publisher = FairQueue(), RunningRequests(), TokenPublisher(parts.streams)
    runner = SampleRunner(
        oplog=oplog,
        records=parts.records,
        backend=backend,
        adapters=_adapters(parts, serving, fair_queue),
        keeper=parts.keeper,
        worker=parts.worker,
        running_requests=running_requests,
        publisher=publisher,
        batch_admission=BatchAdmission(fair_queue, ProjectWeights(parts.limits), backend.batch),
        throttled=ThrottledDispatch(oplog, parts.dispatcher.send, queue, fair_queue.most_served),
        route_files=RouteFiles(parts.store, parts.records.now),
        device_clock=DeviceClock(sampler.gpus_needed),
        gpu_turn=serving.gpu_turn,
    )
    # While the state server is away this channel misses cancellations. The lease renewal reports them, a third of the
    # lease time later.
    cancellations = Channel(connect_state(parts.settings.redis.url), cancelled, running_requests.abort)
    cancellations.start()
    # An orderly stop would wait for requests that never come back.
    watchdog = create_watchdog(parts, serving, exit_process)
    role = sampler_role(full=serving.full)
    heartbeat = create_heartbeat(parts, serving, role, watchdog, batch=backend.batch, holds=sampler.concurrency)
    probe = Probe(backend, watchdog, parts.settings.engine.healthy_s, serving.has_gpu_turn, serving.gpu_turn_soon)

    def close() -> None:
        backend.close()
        publisher.close()
        cancellations.close()
        parts.keeper.stop()

    def hand_back() -> None:
        for request_id in runner.hand_back():
            parts.dispatcher.send("sample", request_id, ids.parent_of(request_id), queue)

    runtime = Runtime(
        handler=runner,
        shared=runner,
        queue=queue,
        heartbeat=heartbeat,
        watchdog=watchdog,
        maintenance=create_maintenance(parts),
        on_tick=probe,
        close=close,
        leave=heartbeat.leave,
        hand_back=hand_back,
    )
    return AssembledSampler(parts, runner, cancellations, runtime)


def _adapters(parts: Parts, serving: Serving[SamplerBackend], fair_queue: FairQueue) -> Adapters:
    def request_owner(prefix: str) -> None:
        """Makes a trainer own the adapter's model. Any trainer will do, as long as one owns it."""
        place = CheckpointPrefix.parse(prefix)
        if place is not None:
            request_id = ids.request_id(place.model_id, place.seq)
            trainers = dispatch.train_queue(serving.base.name, full=serving.full)
            parts.records.put_demand(trainer_role(full=serving.full), serving.base.name)
            parts.dispatcher.send(dispatch.CATCH_UP, request_id, place.model_id, trainers)

    sampler = serving.base.sampler
    files = AdapterFiles(
        parts.store,
        parts.records,
        parts.shm_folder,
        Disk("the fetched adapters", parts.fresh_cache_folder(), parts.settings.engine.free_disk_bytes),
        sampler.cache_bytes,
        request_owner,
        in_place=serving.full,
    )
    at_a_time = 1 if serving.full else sampler.max_loras
    scheduler, capacity = AdapterScheduler(at_a_time, fair_queue), serving.backend.adapter_capacity
    return Adapters(serving.backend, files, scheduler, capacity, serving.gpu_turn)
