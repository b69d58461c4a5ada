"""Puts a sampler together."""

from __future__ import annotations

from app import doorbell, ids
from app.domain.checkpoints import Place
from app.services.base_models import sampler_role
from app.services.limits import LimitsOf
from app.settings import BaseModelSettings, Settings
from app.stores.redis import keys
from app.stores.redis.channel import Channel
from app.stores.redis.client import connect
from workers import shared_memory, telemetry
from workers.adapter_files import AdapterFiles
from workers.adapter_turns import AdapterTurns
from workers.adapters import Adapters
from workers.gate import Gate
from workers.health.presence import Presence
from workers.health.probe import Probe
from workers.health.pulse import Pulse
from workers.held import Held
from workers.runtime.parts import Parts, empty_cache, handover_folder, sweeper
from workers.runtime.running import Runtime, exit_process
from workers.sample_runner import SampleRunner
from workers.shares import Shares
from workers.token_publisher import TokenPublisher
from workers.watches import Watches
from workers.weights import Weights

# Adapters a sampler keeps loaded for each that may run: one that comes back soon need not be read again.
_LOADED_PER_TURN = 4


def make(
    settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str, *, full: bool = False
) -> Runtime:
    from workers.sampling.factory import create

    base = base.for_full_sampler() if full else base
    backend = create(base, full=full)
    noted = settings.data_dir / "run" / f"{node_name}.shared-memory"
    shared_memory.remove_noted(noted)
    info = backend.open()
    shared_memory.note(noted)

    def own_its_model(prefix: str) -> None:
        """Whoever answers may be anybody: it is enough that somebody owns it."""
        place = Place.parse(prefix)
        if place is not None:
            request_id = ids.request_id(place.model_id, place.seq)
            trainers = doorbell.train_queue(base.name, full=full)
            parts.doorbell.ring(doorbell.CATCH_UP, request_id, place.model_id, trainers)

    files = AdapterFiles(
        parts.store,
        parts.records,
        handover_folder(settings),
        empty_cache(settings, node_name),
        base.sampler.cache_bytes,
        own_its_model,
    )
    at_a_time = 1 if full else base.sampler.max_loras
    loaded = 1 if full else _LOADED_PER_TURN * at_a_time
    shares = Shares()
    adapters = Adapters(backend, files, AdapterTurns(at_a_time, shares), loaded)
    gate = Gate(shares, Weights(LimitsOf(parts.records, settings.limits.project)), base.sampler.max_batch)
    held = Held(parts.oplog, parts.doorbell.ring, queue, shares.ahead)
    watches = Watches()
    # What it misses while the state server is away the leases tell, a third of their time later.
    Channel(connect(settings.redis.url), keys.ABORTED_CHANNEL, watches.abort).start()
    publisher = TokenPublisher(parts.streams)
    runner = SampleRunner(
        parts.oplog, parts.records, backend, adapters, parts.keeper, parts.worker, watches, publisher, gate, held
    )
    bell = doorbell.TickBell(parts.celery, doorbell.direct_queue(queue, node_name))
    # An orderly stop would wait for requests that never come back.
    pulse = Pulse(bell, backend.healthy, settings.engine.healthy_s, exit_process)
    metrics, role = telemetry.serve_metrics(base.sampler.metrics_port), sampler_role(full=full)
    presence = Presence(
        parts.records,
        node_name,
        role,
        info,
        backend.describe,
        metrics,
        pulse.healthy,
        queue,
        base.sampler.max_batch,
        base.sampler.concurrency,
    )
    probe = Probe(backend, pulse, settings.engine.healthy_s)

    def close() -> None:
        backend.close()
        publisher.close()
        parts.keeper.stop()

    return Runtime(runner, runner, queue, presence, pulse, sweeper(settings, parts), probe, close, presence.leave)
