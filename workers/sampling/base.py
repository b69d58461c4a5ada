"""The seam between sampling futures and the engine that computes them.

`sample` blocks and is called from many threads at once; the engine batches them. Adapters are immutable: one adapter
id always means the same weights, so a request can be run again anywhere. No torch type crosses this seam.

One that is made to sample models fine-tuned in full takes all weights of a model for an adapter, and holds one model at
a time: loading another waits until no request runs, and takes its place. Its caller sees to it that they take turns
(workers/adapter_turns.py). The base is gone by then: None samples what is there, which tells whether the engine works.

Every implementation passes tests/conformance/test_sampler_*.py, or test_whole_sampler.py there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from workers.sampling.watch import Watch


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
