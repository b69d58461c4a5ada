"""The sampler over vLLM. vLLM batches, pages the cache and applies adapters, or loads fully fine-tuned models."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import OpError, ServerOpError, UnservableModel, UserOpError
from app.settings import BaseModelSettings
from workers.backends import devices
from workers.backends.sampling import token_sampler, vocabulary
from workers.backends.sampling.base import RequestHandle, check_request, no_memory, token_limit
from workers.backends.sampling.vllm import arguments as vllm_arguments
from workers.backends.sampling.vllm import checks, patches
from workers.backends.sampling.vllm import engine as vllm_engine
from workers.backends.sampling.vllm import requests as vllm_requests
from workers.backends.sampling.vllm.engine import EngineThread
from workers.backends.sampling.vllm.requests import Sample, may_read_cache
from workers.backends.sampling.vllm.slots import SequenceSlots, without_reserve
from workers.backends.sampling.vllm.weights import VllmAdapters, VllmFullFinetuneModel, temporary_folder
from workers.models import base_model, full_weights, packed

_NATIVE_PLACE = re.compile(r"\[[0-9:]+\] /[^ ]+: ")
"""The time and source line with which xgrammar's C++ begins an error: "[21:14:23] /project/cpp/x.cc:4944: "."""

_NO_MEMORY = ("out of memory", "allocate memory")
"""The words of torch and of the system for a failed allocation. vLLM passes on the text alone of its processes' errors.
"""


class VllmSampler:
    """A SamplerBackend (workers/backends/sampling/base.py) over vLLM's own processes."""

    batch: int
    adapter_capacity = 1
    _weights: VllmAdapters | VllmFullFinetuneModel

    def __init__(self, settings: BaseModelSettings, *, full: bool = False) -> None:
        self._settings, self._full = settings, full
        self._request_numbers = count(1)
        self._asleep = False

    def open(self) -> BaseModelInfo:
        if self._settings.router_replay:
            raise UnservableModel(
                f"base model {self._settings.name!r}: the vLLM sampler records no experts, so router_replay cannot be "
                'on; turn it off, or set sampler.backend to "transformers"'
            )
        _import_vllm(self._settings)
        skeleton = base_model.skeleton(self._settings)
        if not self._full:
            checks.check_experts(self._settings, skeleton)
            checks.check_rotary_order(self._settings, skeleton)
        checks.check_latent_attention(self._settings, skeleton, full=self._full)
        checks.check_head_sizes(self._settings, skeleton)
        dtype = base_model.choose_dtype(self._settings.dtype, base_model.default_device())
        info = base_model.describe(self._settings, skeleton, dtype)
        computes_in = str(dtype).removeprefix("torch.")
        if not self._full:
            self.adapter_capacity = vllm_arguments.adapter_capacity(self._settings, skeleton, computes_in)
        checks.check_query_scaling(self._settings, skeleton, info.max_context)
        self._end_tokens = vocabulary.load_vocabulary(self._settings).end_tokens
        arguments = vllm_arguments.engine_args(self._settings, skeleton, info.max_context, computes_in, full=self._full)
        checks.check_dtype(self._settings, arguments)
        self._engine = self._start(arguments, computes_in, packed.format_of(skeleton.config, self._settings.name))
        config = self._engine.engine.vllm_config
        self.batch = without_reserve(config.scheduler_config.max_num_seqs)
        self._slots = SequenceSlots(self.batch)
        if self._full:
            self._weights = VllmFullFinetuneModel(self._engine, skeleton)
        else:
            self._weights, info = self._adapters(skeleton, info)
        # The folder of a base model may turn on speculation, which no setting can refuse (SPECULATION in app/settings).
        self._model_info = dataclasses.replace(info, follows_schemas=config.speculative_config is None)
        return self._model_info

    def load(self, adapter_id: str, folder: Path) -> None:
        try:
            self._weights.load(adapter_id, folder)
        except OpError:
            raise
        except Exception as error:
            if self.healthy() and any(said in str(error) for said in _NO_MEMORY):
                raise no_memory(adapter_id) from error
            raise self._op_error(error, f"the adapter in {folder.name} cannot be loaded", by_user=True) from error

    def evict(self, adapter_id: str) -> None:
        self._weights.evict(adapter_id)

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        check_request(request, self._model_info)
        adapter = self._weights.base if adapter_id is None else self._weights.find(adapter_id)
        handle = handle or RequestHandle()
        samples = self._run(adapter, request, handle, may_read_cache(request) and handle.on_tokens is None)
        if request.scores_prompt and samples[0].scores is None:
            # The prefix cache held a row that the request needs.
            samples = self._run(adapter, request, handle, read_cache=False)
        sequences = [sample.sequence() for sample in samples]
        return token_sampler.output(request, sequences, samples[0].scores, handle.cached_tokens)

    def sleep(self) -> None:
        """Moves the weights to host memory and drops the cache, once no request runs. Nothing but `wake` and `close`
        may be called then. On a CPU no memory moves."""
        self._engine.call(lambda engine: engine.sleep(level=1, mode="wait"))
        self._asleep = True

    def wake(self) -> None:
        """Brings the weights back. Does nothing if it is awake."""
        if self._asleep:
            self._engine.call(lambda engine: engine.wake_up())
            self._asleep = False

    def healthy(self) -> bool:
        hangs = self._engine.stalled_s > self._settings.sampler.step_deadline_s
        return self._engine.alive and self._weights.healthy and not hangs

    def close(self) -> None:
        self._engine.stop()
        self._weights.close()

    def describe(self) -> Mapping[str, Any]:
        config = self._engine.engine.vllm_config
        return {
            "sampler": type(self).__name__,
            "dtype": self._model_info.dtype,
            "devices": devices.names(config.device_config.device_type, self._settings.sampler.gpus_needed),
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "adapters": self._weights.ids(),
        }

    def _start(self, arguments: dict[str, Any], dtype: str, form: packed.Format | None) -> EngineThread:
        """Starts vLLM on the base itself, or on plain weights where vLLM would compute other numbers than the trainer:
        with its own quantisation, or with quantised activations. All weights of a full fine-tune are plain, so they
        cannot replace codes."""
        if not self._settings.quantized and (form is None or (form.exact_in_vllm and not self._full)):
            return EngineThread(arguments)
        self._settings.check_quantized()
        with temporary_folder() as folder:
            full_weights.write_dequantized(self._settings, dtype, folder)
            torch.cuda.empty_cache()  # vLLM takes its share of what is free
            return EngineThread({**arguments, "model": str(folder)})

    def _adapters(self, skeleton: nn.Module, info: BaseModelInfo) -> tuple[VllmAdapters, BaseModelInfo]:
        """Returns the place of the adapters; and `info` without the groups that vLLM does not take adapters for."""
        wanted = vllm_arguments.adapted(skeleton)
        paths = [*chain.from_iterable(wanted.values())]
        # A rank of a pipeline has some of the layers.
        of_ranks = self._engine.call(lambda engine: engine.collective_rpc("adapted", args=(paths,)))
        found = frozenset(chain.from_iterable(of_ranks))
        adapters = VllmAdapters(self._engine, found)
        if not torch.cuda.is_available():
            adapters.use_zero_for_base(skeleton)
        groups = (group for group in info.trainable_groups if wanted[group] and found.issuperset(wanted[group]))
        return adapters, dataclasses.replace(info, trainable_groups=tuple(groups))

    def _run(self, adapter: Any, request: SampleRequest, handle: RequestHandle, read_cache: bool) -> list[Sample]:
        """Runs one vLLM request a sample, each with its own seed; the first one scores the prompt."""
        ends = frozenset() if request.ignore_eos else self._end_tokens
        limit, streams = token_limit(request, self._model_info), handle.on_tokens is not None
        # vLLM refuses a prompt that fills the context. Its last token is not needed to score it.
        prompt = request.prompt[: self._model_info.max_context - 1].tolist()
        params = [
            vllm_requests.sampling_params(
                request, index, limit, ends, len(prompt), streams=streams, read_cache=read_cache
            )
            for index in range(request.num_samples)
        ]
        samples = [Sample(request, index, handle.on_tokens, limit) for index in range(request.num_samples)]
        names = [str(next(self._request_numbers)) for _ in samples]

        async def generate(engine: Any, name: str, params: Any, sample: Sample) -> None:
            async with self._slots.slot(handle):
                if handle.aborted:
                    return
                async for result in engine.generate({"prompt_token_ids": prompt}, params, name, lora_request=adapter):
                    handle.sampled_tokens += min(limit, len(result.outputs[0].token_ids))
                    if sample is samples[0]:
                        handle.cached_tokens = result.num_cached_tokens or 0
                    if not handle.aborted:
                        sample.add(result)
            if handle.on_end is not None:
                handle.on_end()

        async def generate_all(engine: Any) -> None:
            async with asyncio.TaskGroup() as group:
                for each in zip(names, params, samples, strict=True):
                    group.create_task(generate(engine, *each))

        try:
            self._engine.generate(generate_all, names, handle)
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if isinstance(error, OpError):
                raise error from None
            raise self._op_error(error, "sampling failed", by_user=_is_refusal(error)) from group
        return samples

    def _op_error(self, error: Exception, what: str, by_user: bool) -> OpError:
        kind = UserOpError if by_user and self.healthy() else ServerOpError
        return kind(f"{what}: {_NATIVE_PLACE.sub('', repr(error))}")


def _import_vllm(settings: BaseModelSettings) -> None:
    """Imports vLLM in its environment, and repairs it here. Raises SetupError where its install is broken."""
    checks.check_install()
    vllm_engine.set_environment(settings)
    checks.check_import()
    patches.repair_stops()
    patches.repair_pieces()


def _is_refusal(error: Exception) -> bool:
    """Returns whether vLLM found the request itself at fault. A plain ValueError is our fault or vLLM's own failure."""
    from vllm.exceptions import VLLMValidationError

    return isinstance(error, VLLMValidationError)
