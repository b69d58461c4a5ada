"""The sampler that needs nothing beyond transformers, and its weights: many adapters, which are applied row by row.

With `full`, one fully fine-tuned model at a time replaces the base's weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import ServerOpError
from app.settings import BaseModelSettings
from workers.backends import devices
from workers.backends.failures import ran_out_of_memory
from workers.backends.sampling import vocabulary
from workers.backends.sampling.base import BATCH, Aborted, RequestHandle, check_request, no_memory
from workers.backends.sampling.transformers import kv_cache
from workers.backends.sampling.transformers.engine import Engine
from workers.backends.sampling.transformers.jobs import Job
from workers.models import base_model, full_weights, lora, peft_files, routers
from workers.models.adapter import Adapter
from workers.models.base_model import LoadedBase


class TransformersSampler:
    """A SamplerBackend (workers/backends/sampling/base.py) in this process, on the first GPU or the CPU."""

    _weights: Weights
    _recorder: routers.Recorder | None = None

    def __init__(self, settings: BaseModelSettings, *, full: bool = False) -> None:
        self._settings, self._full = settings, full
        self.batch = settings.sampler.max_batch or BATCH
        self.adapter_capacity = 1 if full else settings.sampler.loaded_loras

    def open(self) -> BaseModelInfo:
        kv_cache.check_samples(self._settings)
        self._base = base_model.load(self._settings)
        self._vocabulary = vocabulary.load_vocabulary(self._settings)
        if not self._full:
            lora.wrap(self._base.model)
        if self._settings.router_replay:
            routers.wrap(self._base.model)
            self._recorder = routers.Recorder()
        kv_cache.use_decode_attention(self._base.model)
        self._engine = Engine(self._base.model, self._base.device, self.batch)
        self._weights = FullFinetuneModel(self._base, self._engine) if self._full else Adapters(self._base)
        return self._base.info

    def load(self, adapter_id: str, folder: Path) -> None:
        try:
            self._weights.load(adapter_id, folder)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            raise no_memory(adapter_id) from error

    def evict(self, adapter_id: str) -> None:
        self._weights.evict(adapter_id)

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        check_request(request, self._base.info)
        handle = handle or RequestHandle()
        adapter = self._weights.find(adapter_id)
        self._base.check_images(request.images, "prompt")
        job = Job(
            request,
            adapter_id or "",
            adapter,
            self._base.info,
            self._vocabulary,
            handle,
            reader=self._base.images,
            recorder=self._recorder,
        )
        handle.on_abort(lambda: job.fail(Aborted("the request was aborted")))
        self._engine.submit(job)
        return job.future.result()

    def healthy(self) -> bool:
        return self._engine.alive and self._engine.stalled_s <= self._settings.sampler.step_deadline_s

    def close(self) -> None:
        self._engine.stop()

    def describe(self) -> Mapping[str, Any]:
        return {
            "sampler": type(self).__name__,
            "dtype": self._base.info.dtype,
            "devices": devices.names(self._base.device.type),
            "adapters": self._weights.ids(),
        }


class Weights(Protocol):
    """Loads and finds weights by the id that SamplerBackend.load was given."""

    def load(self, weights_id: str, folder: Path) -> None: ...

    def evict(self, weights_id: str) -> None: ...

    def find(self, weights_id: str | None) -> Adapter | None:
        """Returns the adapter to apply, if any. Raises ServerOpError for an id that is not loaded."""
        ...

    def ids(self) -> Sequence[str]: ...


class Adapters:
    """Weights of any number of adapters, in the base's dtype."""

    def __init__(self, base: LoadedBase) -> None:
        self._base = base
        self._adapters: dict[str, Adapter] = {}

    def load(self, weights_id: str, folder: Path) -> None:
        if weights_id in self._adapters:
            return
        adapter = peft_files.read(folder)
        lora.check_fits(adapter, self._base.model)
        # Cast once here instead of in every step. On the device, because on a CPU each tensor waits for all of torch's
        # threads: the 394 of a rank-32 adapter of Qwen3-0.6B took 2 s on two cores that had other work.
        self._adapters[weights_id] = adapter.to(self._base.device, self._base.dtype)

    def evict(self, weights_id: str) -> None:
        self._adapters.pop(weights_id, None)

    def find(self, weights_id: str | None) -> Adapter | None:
        adapter = self._adapters.get(weights_id) if weights_id is not None else None
        if weights_id is not None and adapter is None:
            raise ServerOpError(f"adapter {weights_id!r} is not loaded in this sampler")
        return adapter

    def ids(self) -> Sequence[str]:
        return sorted(self._adapters)


class FullFinetuneModel:
    """Weights of one fully fine-tuned model at a time.

    Another model's weights are written over the present ones once no request uses those.
    """

    def __init__(self, base: LoadedBase, engine: Engine) -> None:
        self._model, self._engine = base.model, engine
        self._loading = threading.Lock()
        self._present: str | None = None

    def load(self, weights_id: str, folder: Path) -> None:
        with self._loading:
            if weights_id == self._present:
                return
            full_weights.check_fits(folder, self._model)
            weights = full_weights.weights_for(self._model, folder)
            self._present = None
            self._engine.when_idle(lambda: _write(self._model, weights))
            self._present = weights_id

    def evict(self, weights_id: str) -> None:
        """Forgets the model. Its memory stays: the next model overwrites it."""
        with self._loading:
            if weights_id == self._present:
                self._present = None

    def find(self, weights_id: str | None) -> Adapter | None:
        if weights_id not in (None, self._present):
            raise ServerOpError(f"model {weights_id!r} is not loaded in this sampler")
        return None

    def ids(self) -> Sequence[str]:
        return [] if self._present is None else [self._present]


def _write(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].copy_(tensor)
