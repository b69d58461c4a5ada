"""A worker's parts without a broker: tests assemble trainers and samplers from them as production does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import redis

from app.dispatch import Dispatcher, celery_app
from app.domain.records import BaseModelInfo
from app.settings import BaseModelSettings, EngineSettings, RedisSettings, SamplerSettings, Settings
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.completions import TokenStreams
from app.stores.redis.journal import RedisOpLog
from workers.backends.sampling.base import SamplerBackend
from workers.process.gpu_turns import GpuTurns
from workers.process.parts import Parts, Serving
from workers.sample.assembly import AssembledSampler, assemble_sampler

INFO = BaseModelInfo("base", "Qwen3ForCausalLM", 320, 512, "float32", ())
# No server is there.
_CELERY = celery_app(Settings(redis=RedisSettings(url="redis://127.0.0.1:1")))


def parts(
    client: redis.Redis,
    settings: Settings,
    worker: str,
    oplog: RedisOpLog,
    store: ObjectStore,
    send: Callable[..., None] = lambda *send: None,
) -> Parts:
    """The parts of a worker over one state server. `send(kind, request id, parent id, queue)` dispatches a request."""
    dispatcher = Dispatcher(_CELERY)
    dispatcher.send = send
    return Parts.over(client, settings, worker, oplog, store, dispatcher, _CELERY, TokenStreams(client))


def sampler(
    client: redis.Redis,
    url: str,
    folder: Path,
    oplog: RedisOpLog,
    backend: SamplerBackend,
    worker: str,
    send: Callable[..., None] = lambda *send: None,
    lease_s: float = 3600.0,
    cancelled: str = keys.ABORTED_CHANNEL,
    turns: GpuTurns | None = None,
    tensor_parallel: int = 1,
) -> AssembledSampler:
    """A sampler over the state server at `url`, with its files in `folder`. It asks after its leases three times a
    `lease_s`, and uses its GPUs in `turns` if any are given."""
    engine = EngineSettings(lease_s=lease_s, handover_dir=str(folder / "handover" / worker))
    settings = Settings(data_dir=folder, redis=RedisSettings(url=url), engine=engine)
    store = FolderStore(folder / "objects", "secret", "http://x")
    base = BaseModelSettings(name="base", path="x", sampler=SamplerSettings(tensor_parallel=tensor_parallel))
    serving = Serving(base, backend, INFO, "sample.base", turns=turns)
    return assemble_sampler(parts(client, settings, worker, oplog, store, send), serving, cancelled)
