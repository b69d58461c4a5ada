"""The probe of a sampler's engine: an idle sampler samples a token now and then, as proof that its engine works."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import numpy as np

from app.domain.sampling import SampleRequest
from app.errors import NoTurnYet, UserOpError
from workers.backends.sampling.base import SamplerBackend
from workers.process.liveness import Watchdog

_ONE_TOKEN = SampleRequest(np.zeros(1, np.int32), num_samples=1, max_tokens=1, seed=0, temperature=0.0)


class Probe:
    """Samples one token now and then, while no request runs. A token behind a full batch would show nothing, and an
    engine that died reports it itself. A UserOpError shows that the engine works. An engine that sleeps is not woken:
    it is probed once it `has_gpu_turn`. `gpu_turn` keeps it awake for the probe, and raises NoTurnYet if it has fallen
    asleep meanwhile."""

    def __init__(
        self,
        backend: SamplerBackend,
        watchdog: Watchdog,
        every_s: float,
        has_gpu_turn: Callable[[], bool],
        gpu_turn: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._backend, self._watchdog, self._every_s = backend, watchdog, every_s
        self._has_gpu_turn, self._gpu_turn = has_gpu_turn, gpu_turn
        self._last = time.monotonic()

    def __call__(self) -> None:
        is_due = time.monotonic() - self._last > self._every_s
        if is_due and self._has_gpu_turn() and not self._watchdog.busy:
            with suppress(NoTurnYet), self._gpu_turn():
                with suppress(UserOpError):  # an answer too: the present model, fully fine-tuned, may have diverged
                    self._backend.sample(None, _ONE_TOKEN)
                self._last = time.monotonic()
