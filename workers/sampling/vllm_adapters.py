"""The adapters vLLM holds, by our ids."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from app.domain.ops import LoraSpec
from app.errors import ServerOpError
from workers import lora
from workers.sampling.vllm_engine import EngineThread


class VllmAdapters:
    """`base` is what a request without an adapter uses: None, or an adapter that changes nothing.

    vLLM caches an adapter under its number, so a number is never used again.
    """

    healthy = True

    def __init__(self, engine: EngineThread) -> None:
        self.base: Any = None
        self._engine = engine
        self._numbers = count(1)
        self._by_id: dict[str, Any] = {}
        self._loading = threading.Lock()
        self._zero: tempfile.TemporaryDirectory[str] | None = None

    def load(self, adapter_id: str, folder: Path) -> None:
        with self._loading:
            if adapter_id not in self._by_id:
                self._by_id[adapter_id] = self._add(adapter_id, folder)

    def evict(self, adapter_id: str) -> None:
        adapter = self._by_id.pop(adapter_id, None)
        if adapter is not None:
            self._engine.call(lambda engine: engine.remove_lora(adapter.lora_int_id))

    def find(self, adapter_id: str) -> Any:
        """Raises ServerOpError for one that is not loaded."""
        adapter = self._by_id.get(adapter_id)
        if adapter is None:
            raise ServerOpError(f"adapter {adapter_id!r} is not loaded in this sampler")
        return adapter

    def ids(self) -> Sequence[str]:
        return sorted(self._by_id)

    def close(self) -> None:
        """The engine has ended."""
        if self._zero is not None:
            self._zero.cleanup()

    def use_zero_for_base(self, skeleton: nn.Module) -> None:
        """Give the base an adapter whose B is zero.

        vLLM 0.32's CPU path marks rows without an adapter by slot -1, which its torch operators read as the last
        slot: once that is taken, the base's rows get another request's adapter.
        """
        spec = LoraSpec(rank=1, train_mlp=False, train_unembed=False)
        self._zero = tempfile.TemporaryDirectory(prefix="tinsmith-")
        lora.write_peft(lora.new_adapter(skeleton, spec), Path(self._zero.name), "")
        self.base = self._add("", Path(self._zero.name))

    def _add(self, name: str, folder: Path) -> Any:
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        adapter = LoRARequest(name or "base", number, str(folder))
        self._engine.call(lambda engine: engine.add_lora(adapter))
        return adapter
