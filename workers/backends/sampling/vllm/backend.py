"""The sampler over vLLM. vLLM batches, pages the cache and applies adapters, or loads fully fine-tuned models."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.domain.ops import LoraSpec
from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import OpError, ServerOpError, UnservableModel, UserOpError
from app.settings import BaseModelSettings
from workers.backends import devices
from workers.backends.sampling import token_sampler, vocabulary
from workers.backends.sampling.base import RequestHandle, check_request, no_memory, token_limit
from workers.backends.sampling.vllm import arguments as vllm_arguments
from workers.backends.sampling.vllm import engine as vllm_engine
from workers.backends.sampling.vllm import patches
from workers.backends.sampling.vllm import requests as vllm_requests
from workers.backends.sampling.vllm.engine import EngineThread
from workers.backends.sampling.vllm.requests import Sample, may_read_cache
from workers.backends.sampling.vllm.slots import SequenceSlots, without_reserve
from workers.models import base_model, experts, full_weights, lora, packed, peft_files

_NATIVE_PLACE = re.compile(r"\[[0-9:]+\] /[^ ]+: ")
"""The time and source line with which xgrammar's C++ begins an error: "[21:14:23] /project/cpp/x.cc:4944: "."""

_TEMPORARY = "tinsmith-vllm-"
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
        vllm_engine.check_install()
        vllm_engine.set_environment(self._settings)
        vllm_engine.check_import()
        patches.repair_stops()
        patches.repair_pieces()
        skeleton = base_model.skeleton(self._settings)
        if not self._full:
            vllm_engine.check_experts(self._settings, skeleton)
        vllm_engine.check_latent_attention(self._settings, skeleton)
        vllm_engine.check_head_sizes(self._settings, skeleton)
        dtype = base_model.choose_dtype(
            self._settings.dtype, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        )
        info = base_model.describe(self._settings, skeleton, dtype)
        computes_in = str(dtype).removeprefix("torch.")
        if not self._full:
            self.adapter_capacity = vllm_arguments.adapter_capacity(self._settings, skeleton, computes_in)
        vllm_engine.check_query_scaling(self._settings, skeleton, info.max_context)
        self._end_tokens = vocabulary.load_vocabulary(self._settings).end_tokens
        arguments = vllm_arguments.engine_args(self._settings, skeleton, info.max_context, computes_in, full=self._full)
        vllm_engine.check_dtype(self._settings, arguments)
        self._engine = self._start(arguments, packed.format_of(skeleton.config, self._settings.name))
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
        return token_sampler.output(request, sequences, samples[0].scores, samples[0].cached_tokens)

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

    def _start(self, arguments: dict[str, Any], form: packed.Format | None) -> EngineThread:
        """Starts vLLM on the base itself, or on plain weights where vLLM would compute other numbers than the trainer:
        with its own quantisation, or with quantised activations."""
        if not self._settings.quantized and (form is None or form.exact_in_vllm):
            return EngineThread(arguments)
        self._settings.check_quantized()
        with _temporary_folder() as folder:
            full_weights.write_dequantized(self._settings, folder)
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


def _is_refusal(error: Exception) -> bool:
    """Returns whether vLLM found the request itself at fault. A plain ValueError is our fault or vLLM's own failure."""
    from vllm.exceptions import VLLMValidationError

    return isinstance(error, VLLMValidationError)


class VllmAdapters:
    """Weights of many adapters in vLLM, each on modules of `adapted` alone: vLLM drops others in silence.

    `base` is used by a request without an adapter: None, or an adapter that changes nothing. vLLM caches an adapter
    under its number, so a number is never used again.
    """

    healthy = True

    def __init__(self, engine: EngineThread, adapted: Collection[str]) -> None:
        self.base: Any = None
        self._engine, self._adapted = engine, adapted
        self._numbers = count(1)
        self._by_id: dict[str, Any] = {}
        self._loading = threading.Lock()
        self._folders = ExitStack()

    def load(self, adapter_id: str, folder: Path) -> None:
        with self._loading:
            if adapter_id not in self._by_id:
                self._check_adapted(folder)
                self._by_id[adapter_id] = self._add(adapter_id, folder)

    def _check_adapted(self, folder: Path) -> None:
        """Raises UserOpError for an adapter with a module that vLLM would drop, even if its pair there is zero: the
        header of its file does not tell."""
        path = next((path for path in peft_files.paths(folder) if path not in self._adapted), None)
        if path is not None:
            raise UserOpError(
                f"the adapter has weights on {experts.module_path(path)}, where this vLLM sampler applies none: have "
                'it sampled with sampler.backend = "transformers", or train with that group off in lora_config '
                "(train_mlp, train_attn or train_unembed)"
            )

    def evict(self, adapter_id: str) -> None:
        adapter = self._by_id.pop(adapter_id, None)
        if adapter is not None:
            self._engine.call(lambda engine: engine.remove_lora(adapter.lora_int_id))

    def find(self, adapter_id: str) -> Any:
        """Returns a loaded adapter. Raises ServerOpError for one that is not loaded."""
        adapter = self._by_id.get(adapter_id)
        if adapter is None:
            raise ServerOpError(f"adapter {adapter_id!r} is not loaded in this sampler")
        return adapter

    def ids(self) -> Sequence[str]:
        return sorted(self._by_id)

    def close(self) -> None:
        """Frees the base's adapter folder once the engine has ended."""
        self._folders.close()

    def use_zero_for_base(self, skeleton: nn.Module) -> None:
        """Gives the base an adapter whose B is zero.

        vLLM 0.32's CPU path marks rows without an adapter by slot -1. Its torch operators read -1 as the last slot:
        once that slot is taken, the base's rows get another request's adapter.
        """
        spec = LoraSpec(rank=1, train_mlp=False, train_unembed=False)
        folder = self._folders.enter_context(_temporary_folder())
        peft_files.write(lora.new_adapter(skeleton, spec), folder, "", skeleton)
        self.base = self._add("", folder)

    def _add(self, name: str, folder: Path) -> Any:
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        adapter = LoRARequest(name or "base", number, str(folder))
        self._engine.call(lambda engine: engine.add_lora(adapter))
        return adapter


class VllmFullFinetuneModel:
    """Weights of one fully fine-tuned model at a time in vLLM. Its requests need no adapter."""

    base = None

    def __init__(self, engine: EngineThread, skeleton: nn.Module) -> None:
        self._engine, self._skeleton, self._stored = engine, skeleton, full_weights.Stored(skeleton)
        self._loading = threading.Lock()
        self._present: str | None = None
        self._torn = False

    @property
    def healthy(self) -> bool:
        """False once weights may have been written in part."""
        return not self._torn

    def load(self, weights_id: str, folder: Path) -> None:
        with self._loading:
            if weights_id == self._present:
                return
            full_weights.check_fits(folder, self._skeleton)
            names = self._stored.names_in(folder)  # at another name vLLM would fail midway
            self._present = None
            try:
                self._engine.call(partial(_replace, folder, names))
            except BaseException:
                self._torn = True
                raise
            self._present = weights_id

    def evict(self, weights_id: str) -> None:
        """Forgets the model. Its memory stays: the next model overwrites it."""
        with self._loading:
            if weights_id == self._present:
                self._present = None

    def find(self, weights_id: str) -> None:
        """Raises ServerOpError for a model that is not loaded."""
        if weights_id != self._present:
            raise ServerOpError(f"model {weights_id!r} is not loaded in this sampler")

    def ids(self) -> Sequence[str]:
        return [] if self._present is None else [self._present]

    def close(self) -> None:
        """Does nothing: there is nothing to free once the engine has ended."""


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A new folder for files that vLLM reads. Removes those that killed processes left, such as a whole model at each
    start that ran out of memory. A live process holds the lock of its own."""
    for left in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*/files"):
        with suppress(OSError), _locked(left.parent):
            shutil.rmtree(left.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as name, ExitStack() as stack:
        with suppress(OSError):  # without locks, no process removes anything
            stack.enter_context(_locked(Path(name)))
        files = Path(name) / "files"  # after the lock: others take no folder without it for one that was left
        files.mkdir()
        yield files


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder until the block or the process ends. Raises OSError, such as when another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


async def _replace(folder: Path, names: Sequence[str], engine: Any) -> None:
    """Replaces the weights once no request runs. vLLM then also forgets the prefixes in its cache."""
    await engine.pause_generation(mode="wait", clear_cache=True)
    await engine.collective_rpc("replace_weights", args=(str(folder), names))
    await engine.resume_generation()
