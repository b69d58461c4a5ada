"""All weights of one model at a time in vLLM, in the place of the base's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from app.errors import ServerOpError
from workers.sampling import whole_weights
from workers.sampling.vllm_engine import EngineThread


class VllmWholeModel:
    """No request needs an adapter for it."""

    base = None

    def __init__(self, engine: EngineThread, skeleton: nn.Module) -> None:
        self._engine, self._skeleton = engine, skeleton
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
            whole_weights.check_fits(folder, self._skeleton)
            self._present = None
            try:
                self._engine.call(partial(_replace, folder))
            except BaseException:
                self._torn = True
                raise
            self._present = weights_id

    def evict(self, weights_id: str) -> None:
        """What is there keeps its memory: the next takes its place."""
        with self._loading:
            if weights_id == self._present:
                self._present = None

    def find(self, weights_id: str) -> None:
        """Raises ServerOpError for one that is not there."""
        if weights_id != self._present:
            raise ServerOpError(f"model {weights_id!r} is not loaded in this sampler")

    def ids(self) -> Sequence[str]:
        return [] if self._present is None else [self._present]

    def close(self) -> None:
        """The engine has ended."""


async def _replace(folder: Path, engine: Any) -> None:
    """Once no request runs, which is when vLLM also forgets the prefixes in its cache."""
    await engine.pause_generation(mode="wait", clear_cache=True)
    await engine.collective_rpc("replace_weights", args=(str(folder),))
    await engine.resume_generation()
