"""What an idle sampler does at a tick: it samples a token now and then, as proof that its engine still works."""

from __future__ import annotations

import time

import numpy as np

from app.domain.sampling import SampleRequest
from workers.health.pulse import Pulse
from workers.sampling.base import SamplerBackend

_ONE_TOKEN = SampleRequest(np.zeros(1, np.int32), num_samples=1, max_tokens=1, seed=0, temperature=0.0)


class Probe:
    """Not while requests run: one behind a full batch would tell nothing, and an engine that died says so itself."""

    def __init__(self, backend: SamplerBackend, pulse: Pulse, every_s: float) -> None:
        self._backend, self._pulse, self._every_s = backend, pulse, every_s
        self._last = time.monotonic()

    def __call__(self) -> None:
        if not self._pulse.busy and time.monotonic() - self._last > self._every_s:
            self._backend.sample(None, _ONE_TOKEN)
            self._last = time.monotonic()
