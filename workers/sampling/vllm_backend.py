"""The sampler over vLLM: its engine batches, pages the cache and applies the adapters."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.errors import OpError, ServerOpError, SetupError, UserOpError
from app.settings import BaseModelSettings
from workers import base_model
from workers.sampling import vllm_setup, vocabulary
from workers.sampling.requests import check, check_finite, sample_seed, token_limit
from workers.sampling.vllm_adapters import VllmAdapters
from workers.sampling.vllm_engine import EngineThread
from workers.sampling.watch import Watch


class VllmSampler:
    """A SamplerBackend (workers/sampling/base.py) over vLLM's own processes."""

    def __init__(self, settings: BaseModelSettings) -> None:
        self._settings = settings
        self._request_numbers = count(1)

    def open(self) -> BaseModelInfo:
        vllm_setup.check_install()
        vllm_setup.set_environment(self._settings)
        skeleton = _skeleton(self._settings)
        info = _info(self._settings, skeleton)
        self._end_tokens = vocabulary.load(self._settings).end_tokens
        self._engine = EngineThread(vllm_setup.engine_args(self._settings, info.max_context, info.dtype))
        self._adapters = VllmAdapters(self._engine)
        if not torch.cuda.is_available():
            self._zero = tempfile.TemporaryDirectory(prefix="tinsmith-")
            self._adapters.use_zero_for_base(skeleton, self._zero)
        if not all(self._engine.call(lambda engine: engine.collective_rpc("adapts_head"))):
            groups = tuple(group for group in info.trainable_groups if group != "unembed")
            info = dataclasses.replace(info, trainable_groups=groups)
        self._model_info = info
        return info

    def load(self, adapter_id: str, folder: Path) -> None:
        try:
            self._adapters.load(adapter_id, folder)
        except ServerOpError:
            raise
        except Exception as error:
            raise self._op_error(error, f"the adapter in {folder.name} cannot be loaded", by_user=True) from error

    def evict(self, adapter_id: str) -> None:
        self._adapters.evict(adapter_id)

    def sample(self, adapter_id: str | None, request: SampleRequest, watch: Watch | None = None) -> SampleOutput:
        check(request, self._model_info)
        adapter = self._adapters.base if adapter_id is None else self._adapters.by_id.get(adapter_id)
        if adapter_id is not None and adapter is None:
            raise ServerOpError(f"adapter {adapter_id!r} is not loaded in this sampler")
        try:
            results = self._engine.call(lambda engine: self._generate(engine, adapter, request))
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise self._op_error(error, "sampling failed", by_user=_is_refusal(error)) from group
        scores = np.array(_values(results[0].prompt_logprobs), np.float32) if request.prompt_logprobs else None
        return SampleOutput(tuple(_sequence(result.outputs[0]) for result in results), scores)

    def healthy(self) -> bool:
        return self._engine.alive

    def close(self) -> None:
        self._engine.stop()
        if not torch.cuda.is_available():
            self._zero.cleanup()

    def describe(self) -> Mapping[str, Any]:
        config = self._engine.engine.vllm_config
        return {
            "sampler": type(self).__name__,
            "dtype": self._model_info.dtype,
            "devices": [config.device_config.device_type],
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "adapters": sorted(self._adapters.by_id),
        }

    async def _generate(self, engine: Any, adapter: Any, request: SampleRequest) -> list[Any]:
        """One vLLM request a sample, each with its own seed; the first one scores the prompt."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._generate_one(engine, adapter, request, index))
                for index in range(request.num_samples)
            ]
        return [task.result() for task in tasks]

    async def _generate_one(self, engine: Any, adapter: Any, request: SampleRequest, index: int) -> Any:
        prompt = {"prompt_token_ids": request.prompt.tolist()}
        params = self._params(request, index)
        name = str(next(self._request_numbers))
        async for result in engine.generate(prompt, params, name, lora_request=adapter):
            final = result
        return final

    def _params(self, request: SampleRequest, index: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ends = frozenset() if request.ignore_eos else self._end_tokens
        return SamplingParams(
            max_tokens=token_limit(request, self._model_info),
            # torch.Generator, which vLLM seeds with it, takes 63 bits without wrapping.
            seed=int(sample_seed(request.seed, index).generate_state(1, np.uint64)[0] >> 1),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            stop=list(request.stop_strings),
            stop_token_ids=sorted(ends.union(request.stop_tokens)),
            ignore_eos=True,  # they are among the stop tokens
            logprobs=0,
            prompt_logprobs=0 if request.prompt_logprobs and index == 0 else None,
            flat_logprobs=True,
            detokenize=bool(request.stop_strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _op_error(self, error: Exception, what: str, by_user: bool) -> OpError:
        kind = UserOpError if by_user and self._engine.alive else ServerOpError
        return kind(f"{what}: {error!r}")


def _is_refusal(error: Exception) -> bool:
    """Whether vLLM found the request itself at fault."""
    from vllm.exceptions import VLLMClientError

    return isinstance(error, ValueError | VLLMClientError)


def _skeleton(settings: BaseModelSettings) -> nn.Module:
    """The model without its weights, which are vLLM's to load. Raises SetupError when there is no such model."""
    try:
        config = AutoConfig.from_pretrained(vocabulary.local_path(settings.path))
    except (OSError, ValueError) as error:
        raise SetupError(f"base model {settings.name!r} cannot be loaded from {settings.path!r}: {error}") from None
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _info(settings: BaseModelSettings, skeleton: nn.Module) -> BaseModelInfo:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return base_model.describe(settings, skeleton, base_model.choose_dtype(settings.dtype, device))


def _sequence(output: Any) -> SampledSequence:
    logprobs = np.array(_values(output.logprobs), np.float32)
    check_finite(float(logprobs.sum()))
    return SampledSequence(np.array(output.token_ids, np.int32), logprobs, output.finish_reason == "stop")


def _values(logprobs: Any) -> list[float]:
    """The logprob of each position's own token, which comes first in vLLM's FlatLogprobs; NaN where there is none."""
    spans = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [logprobs.logprobs[start] if start < end else float("nan") for start, end in spans]
