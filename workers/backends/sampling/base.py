"""The sampling backend protocol, and the checks and seeds of a request, which all engines share. No heavy library loads
with this module.

`sample` blocks and is called from many threads at once; the engine batches the calls. Adapters are immutable: one
adapter id always means the same weights, so a request can run again anywhere. No torch type crosses this protocol.

A backend for full fine-tuning takes all weights of a model as an adapter, and holds one model at a time. Loading
another model waits until no request runs, then replaces the present one. The caller makes models take turns
(workers/sample/adapters.py). The base's own weights are not loaded then: None samples the present model, which shows
whether the engine works.

Every implementation passes tests/conformance/test_sampler_*.py, or test_full_model_sampler.py there.

A RequestHandle observes the tokens of a request while it runs, and cancels it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import TinsmithError, Unavailable, UserOpError

BATCH = 64
"""Sequences decoded together where the settings say 0, except with vLLM on a GPU."""
OnTokens = Callable[[int, Sequence[int], Sequence[float]], None]
"""Called with i, further tokens of sample i, and their logprobs, in order. The engine's thread calls it, so it must not
block."""
OnEnd = Callable[[], None]
"""Called when one more sample has ended, also by the engine's thread."""


class SamplerBackend(Protocol):
    """One base model and any number of adapters in PEFT files, or one fully fine-tuned model at a time."""

    def open(self) -> BaseModelInfo:
        """Loads the engine. Called once, before anything else. Raises SetupError."""
        ...

    @property
    def batch(self) -> int:
        """Sequences that it decodes together. Known once it is open."""
        ...

    @property
    def adapter_capacity(self) -> int:
        """The most adapters that stay loaded, those in use included. Beyond it the caller evicts unused ones. Known
        once it is open."""
        ...

    def load(self, adapter_id: str, folder: Path) -> None:
        """Makes the adapter in `folder` usable; a loaded id stays as it is. The caller keeps `folder` until `evict`.

        Raises UserOpError when the files are damaged or do not fit the base model, Unavailable when memory is too small
        for them now, and ServerOpError when the engine has failed.
        """
        ...

    def evict(self, adapter_id: str) -> None:
        """Frees an adapter that no request uses. Accepts unknown ids."""
        ...

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        """Runs one request; None is the base itself. A prompt that fills the context is scored, and its samples are
        empty. Raises UserOpError for a request that only the engine can refuse, and ServerOpError when the adapter is
        not loaded or the engine has failed.

        Raises Aborted soon after `handle.abort()`: the engine then stops the request, or does not start it.
        While other projects want rows, `handle.project` has its share of the batch
        (workers/backends/sampling/shares.py); its samples do not depend on it.

        `handle.on_tokens`, if set, is called with every token and its logprob before `sample` returns. `handle.on_end`
        is called, at least once, for each sample that frees its row in the batch. The tokens generated are added to
        `handle.sampled_tokens` by the time that `sample` returns or raises Aborted. vLLM sets `handle.cached_tokens`
        with its first tokens."""
        ...

    def healthy(self) -> bool:
        """Returns False once the engine cannot serve, or has requests but no token for `sampler.step_deadline_s`.

        The worker then exits and is restarted.
        """
        ...

    def close(self) -> None:
        """Stops the engine and its processes."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Returns the running configuration as JSON: sampler class, dtype, devices, adapters loaded."""
        ...


class Aborted(TinsmithError):
    """The request was cancelled because its result is no longer wanted."""


class RequestHandle:
    """Cancellation handle and progress of one request. Safe from any thread.

    `on_tokens` is called with new tokens, and `on_end` when a sample is complete; both are optional. `project` and
    `weight`: the project that the request counts for when projects share the engine's batch
    (workers/backends/sampling/shares.py).

    Its usage so far: `prompt_tokens` is 0 until the engine has the request, `cached_tokens` are those of the prompt
    that were in the engine's cache, and `device_ms` is set when the request leaves the engine."""

    def __init__(
        self,
        on_tokens: OnTokens | None = None,
        on_end: OnEnd | None = None,
        project: str = "",
        weight: float = 1.0,
    ) -> None:
        self.on_tokens, self.on_end = on_tokens, on_end
        self.project, self.weight = project, weight
        self.prompt_tokens = self.cached_tokens = self.sampled_tokens = self.device_ms = 0
        self._lock = threading.Lock()
        self._aborted = False
        self._callbacks: list[Callable[[], object]] = []

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def tokens_used(self) -> int:
        """The engine tokens used so far, those of the prompt included."""
        return self.prompt_tokens + self.sampled_tokens

    def abort(self) -> None:
        """Cancels the request soon. A second call, or a call after its end, changes nothing."""
        with self._lock:
            callbacks, self._callbacks, self._aborted = self._callbacks, [], True
        for callback in callbacks:
            callback()

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once, from the thread that cancels; at once if the request is cancelled already."""
        with self._lock:
            if not self._aborted:
                self._callbacks.append(callback)
                return
        callback()


def check_request(request: SampleRequest, info: BaseModelInfo) -> None:
    """Raises UserOpError for a request that the model cannot take."""
    if min(request.num_samples, request.max_tokens) < 1:
        raise UserOpError(
            f"num_samples is {request.num_samples} and max_tokens is {request.max_tokens}; both must be at least 1"
        )
    if request.images and not info.reads_images:
        raise UserOpError(f"this sampler of {info.name} takes prompts of text alone, without images")
    if request.json_schema and not info.follows_schemas:
        raise UserOpError(f"this sampler of {info.name} cannot follow a JSON schema; sampler.backend vllm can")
    length, longest = len(request.prompt), request.longest_prompt(info.max_context)
    if not 0 < length <= longest:
        raise UserOpError(
            f"the prompt has {length} tokens; {info.name} takes 1 to {longest}, as its context has {info.max_context}"
        )
    low, high = int(request.prompt.min()), int(request.prompt.max())
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise UserOpError(f"prompt token {wrong} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1})")


def no_memory(adapter_id: str) -> Unavailable:
    """Returns the error of a load that found too little memory: other requests and adapters may free some."""
    return Unavailable(f"memory is too small now to load {adapter_id}; it is tried again later")


def check_finite(logprob: float) -> None:
    """Raises UserOpError for NaN, the result of non-finite logits."""
    if isnan(logprob):
        raise UserOpError("the model's logits are not finite; the adapter holds NaN, infinite or huge weights")


def token_limit(request: SampleRequest, info: BaseModelInfo) -> int:
    """Returns the token limit of a sample: max_tokens, or the space left in the context, which may be 0."""
    return min(request.max_tokens, info.max_context - len(request.prompt))


def sample_seed(seed: int, index: int) -> np.random.SeedSequence:
    """Returns the seed of sample `index` of a call: independent streams, for any seeds and any number of samples."""
    if 0 <= seed < 2**32:
        return np.random.SeedSequence([seed, index])
    # SeedSequence makes words of 32 bits, as few as each number needs, and pads them with zeros. A last word of 1 keeps
    # a seed of two words apart from a seed of one with its index.
    low, high = seed % 2**32, seed // 2**32 % 2**32
    return np.random.SeedSequence([low, high, index % 2**32, index // 2**32, 1])


def alternatives_seed(seed: int) -> np.random.SeedSequence:
    """Returns the seed for token sampling at a call's prompt positions: a stream apart from those of its samples."""
    return sample_seed(seed, 2**32)
