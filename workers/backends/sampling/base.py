"""The seam between sampling futures and the engine that computes them, and the choice of that engine.

`sample` blocks and is called from many threads at once; the engine batches them. Adapters are immutable: one adapter
id always means the same weights, so a request can be run again anywhere. No torch type crosses this seam.

One that is made to sample models fine-tuned in full takes all weights of a model for an adapter, and holds one model
at a time: loading another waits until no request runs, and takes its place. Its caller sees to it that they take
turns (workers/sample/adapters.py). The base is gone by then: None samples what is there, which tells whether the
engine works.

Every implementation passes tests/conformance/test_sampler_*.py, or test_whole_sampler.py there.

A Watch sees the tokens of a request while it runs, and stops it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from app.domain.base_model import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import SetupError, TinsmithError
from app.settings import NO_VLLM, BaseModelSettings

log = logging.getLogger(__name__)
Drawn = Callable[[int, Sequence[int], Sequence[float]], None]
"""Told of further tokens of sample i and their logprobs, in order, by the engine's thread: it must not block."""
Ended = Callable[[], None]
"""Told that one more sample has ended, by the engine's thread as well."""


class SamplerBackend(Protocol):
    """One base model and any number of adapters in PEFT files, or one whole model at a time."""

    def open(self) -> BaseModelInfo:
        """Load the engine. Called once, before anything else."""
        ...

    def load(self, adapter_id: str, folder: Path) -> None:
        """Make the adapter in `folder` usable; repeating an id is a no-op. `folder` stays until `evict`."""
        ...

    def evict(self, adapter_id: str) -> None:
        """Free an adapter that no request uses; unknown ids are fine."""
        ...

    def sample(self, adapter_id: str | None, request: SampleRequest, watch: Watch | None = None) -> SampleOutput:
        """Run one request; None is the base itself. Raises UserOpError for what only the engine can refuse.

        Raises Aborted soon after `watch.abort()`: the engine then works on it no more, nor begins if it has not.
        `watch.drawn`, if set, is told of every token and its logprob before `sample` returns, and `watch.ended` of each
        sample that leaves its place in the batch to another, at least once. What was drawn is added to `watch.took` by
        the time that `sample` returns or raises Aborted.
        """
        ...

    def healthy(self) -> bool:
        """False once the engine cannot serve, or has drawn nothing of what it runs for `sampler.step_deadline_s`; the
        worker then exits to be restarted."""
        ...

    def close(self) -> None:
        """Stop the engine and its processes."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What really runs, as JSON: sampler class, dtype, devices, adapters loaded."""
        ...


class Aborted(TinsmithError):
    """The request was stopped because nobody wants its result any more."""


class Watch:
    """One request's. `drawn` is told of tokens as they come, and `ended` of samples that are whole; without them nobody
    looks on. `took`: the tokens it has taken of the engine, those of its prompt included. Safe from any thread."""

    def __init__(self, drawn: Drawn | None = None, ended: Ended | None = None) -> None:
        self.drawn, self.ended = drawn, ended
        self.took = 0
        self._lock = threading.Lock()
        self._aborted = False
        self._callbacks: list[Callable[[], object]] = []

    @property
    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        """Stop the request soon; again, or behind its end, changes nothing."""
        with self._lock:
            callbacks, self._callbacks, self._aborted = self._callbacks, [], True
        for callback in callbacks:
            callback()

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call it once, from the thread that aborts; at once if that has been."""
        with self._lock:
            if not self._aborted:
                self._callbacks.append(callback)
                return
        callback()


def create(settings: BaseModelSettings, *, full: bool = False) -> SamplerBackend:
    """The backend the settings ask for; "auto" is vLLM where there is a GPU and vLLM is installed, else transformers.

    `full`: what it loads is all weights of a model, one at a time, in the place of its base's.

    Raises SetupError when a GPU is asked for that is not there. `open` does when vLLM is asked for and cannot run here.
    """
    import torch

    gpus = torch.cuda.device_count()
    check_devices(settings.sampler.devices, gpus)
    if choose(settings.sampler.backend, gpus, vllm=find_spec("vllm") is not None) == "vllm":
        from workers.backends.sampling.vllm.backend import VllmSampler

        return VllmSampler(settings, full=full)
    from workers.backends.sampling.transformers.backend import TransformersSampler

    return TransformersSampler(settings, full=full)


def choose(asked: str, gpus: int, *, vllm: bool) -> str:
    """The backend on a machine with so many GPUs, and with vLLM or without; says so when a GPU has to do without."""
    if asked != "auto":
        return asked
    if gpus and not vllm:
        log.warning(NO_VLLM)
    return "vllm" if gpus and vllm else "transformers"


def check_devices(named: tuple[int, ...], gpus: int) -> None:
    """`gpus`: how many torch sees, which are among those named. Raises SetupError when some are missing."""
    if len(named) > gpus:
        seen = f"only {gpus} of them" if gpus else "no GPU"
        raise SetupError(f"sampler.devices is {list(named)} but torch sees {seen} here; correct the list")
