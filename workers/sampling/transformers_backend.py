"""The sampler that needs nothing beyond transformers: continuous batching with adapters applied row by row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import ServerOpError
from app.settings import BaseModelSettings
from workers import base_model, lora
from workers.sampling import vocabulary
from workers.sampling.engine import Engine
from workers.sampling.requests import check
from workers.sampling.sequences import Job
from workers.sampling.watch import Watch


class TransformersSampler:
    """A SamplerBackend (workers/sampling/base.py) in this process, on the first GPU or the CPU."""

    def __init__(self, settings: BaseModelSettings) -> None:
        self._settings = settings
        self._adapters: dict[str, lora.Adapter] = {}

    def open(self) -> BaseModelInfo:
        self._base = base_model.load(self._settings)
        self._vocabulary = vocabulary.load(self._settings)
        lora.wrap(self._base.model)
        self._engine = Engine(self._base.model, self._base.device, self._settings.sampler.max_batch)
        return self._base.info

    def load(self, adapter_id: str, folder: Path) -> None:
        if adapter_id in self._adapters:
            return
        adapter = lora.read_peft(folder)
        lora.check_fits(adapter, self._base.model)
        self._adapters[adapter_id] = _cast(adapter, self._base.device, self._base.dtype)

    def evict(self, adapter_id: str) -> None:
        self._adapters.pop(adapter_id, None)

    def sample(self, adapter_id: str | None, request: SampleRequest, watch: Watch | None = None) -> SampleOutput:
        check(request, self._base.info)
        adapter = self._adapters.get(adapter_id) if adapter_id is not None else None
        if adapter_id is not None and adapter is None:
            raise ServerOpError(f"adapter {adapter_id!r} is not loaded in this sampler")
        job = Job(request, adapter_id or "", adapter, self._base.info, self._vocabulary)
        self._engine.submit(job)
        return job.future.result()

    def healthy(self) -> bool:
        return self._engine.alive

    def close(self) -> None:
        self._engine.stop()

    def describe(self) -> Mapping[str, Any]:
        return {
            "sampler": type(self).__name__,
            "dtype": self._base.info.dtype,
            "devices": [str(self._base.device)],
            "adapters": sorted(self._adapters),
        }


def _cast(adapter: lora.Adapter, device: torch.device, dtype: torch.dtype) -> lora.Adapter:
    """The adapter in the base's dtype: cast once here instead of in every step."""

    def cast(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to(device, dtype), requires_grad=False)

    pairs = {path: lora.LoraPair(cast(pair.a), cast(pair.b)) for path, pair in adapter.pairs.items()}
    return lora.Adapter(adapter.spec, pairs)
