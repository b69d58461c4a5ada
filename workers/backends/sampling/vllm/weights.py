"""Weights in vLLM's engine, which reads their files: those of many adapters, or of one fully fine-tuned model at a
time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from app.domain.ops import LoraSpec
from app.errors import ServerOpError, UserOpError
from workers.backends.sampling.vllm.engine import EngineThread
from workers.models import experts, full_weights, lora, peft_files

_TEMPORARY = "tinsmith-vllm-"


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
        folder = self._folders.enter_context(temporary_folder())
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
        self._partly_written = False

    @property
    def healthy(self) -> bool:
        """False once weights may have been written in part."""
        return not self._partly_written

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
                self._partly_written = True
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
def temporary_folder() -> Iterator[Path]:
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
