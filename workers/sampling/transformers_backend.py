"""The sampler that needs nothing beyond transformers: continuous batching with adapters applied row by row.

With `full` its base's weights are those of one whole model at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.settings import BaseModelSettings
from workers import base_model, lora
from workers.sampling import attention, vocabulary
from workers.sampling.engine import Engine
from workers.sampling.requests import check
from workers.sampling.sequences import Job
from workers.sampling.transformers_weights import Adapters, Weights, WholeModel
from workers.sampling.watch import Aborted, Watch


class TransformersSampler:
    """A SamplerBackend (workers/sampling/base.py) in this process, on the first GPU or the CPU."""

    _weights: Weights

    def __init__(self, settings: BaseModelSettings, *, full: bool = False) -> None:
        self._settings, self._full = settings, full

    def open(self) -> BaseModelInfo:
        self._base = base_model.load(self._settings)
        self._vocabulary = vocabulary.load(self._settings)
        if not self._full:
            lora.wrap(self._base.model)
        attention.use(self._base.model)
        self._engine = Engine(self._base.model, self._base.device, self._settings.sampler.max_batch)
        self._weights = WholeModel(self._base, self._engine) if self._full else Adapters(self._base)
        return self._base.info

    def load(self, adapter_id: str, folder: Path) -> None:
        self._weights.load(adapter_id, folder)

    def evict(self, adapter_id: str) -> None:
        self._weights.evict(adapter_id)

    def sample(self, adapter_id: str | None, request: SampleRequest, watch: Watch | None = None) -> SampleOutput:
        check(request, self._base.info)
        watch = watch or Watch()
        adapter = self._weights.find(adapter_id)
        job = Job(request, adapter_id or "", adapter, self._base.info, self._vocabulary, watch)
        watch.on_abort(lambda: job.fail(Aborted("the request was aborted")))
        self._engine.submit(job)
        return job.future.result()

    def healthy(self) -> bool:
        return self._engine.alive and self._engine.stands_still_s <= self._settings.sampler.step_deadline_s

    def close(self) -> None:
        self._engine.stop()

    def describe(self) -> Mapping[str, Any]:
        return {
            "sampler": type(self).__name__,
            "dtype": self._base.info.dtype,
            "devices": [str(self._base.device)],
            "adapters": self._weights.ids(),
        }
