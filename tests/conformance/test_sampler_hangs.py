"""An engine that is alive but makes no progress, in both samplers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from tests.conformance.samplers import PROMPTS, one
from workers.backends.sampling.transformers.backend import TransformersSampler


@contextmanager
def hung(sampler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the sampler's model compute nothing until the block ends."""
    if isinstance(sampler, TransformersSampler):
        model, goes_on = sampler._base.model, threading.Event()
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda *args, **named: goes_on.wait() and forward(*args, **named))
        stop, resume = [], [goes_on.set]
    else:
        processes = psutil.Process().children(recursive=True)
        stop, resume = [process.suspend for process in processes], [process.resume for process in processes]
    for each in stop:
        each()
    try:
        yield
    finally:
        for each in resume:
            each()


def test_an_engine_that_draws_nothing_of_what_it_runs_is_not_healthy_until_it_does(sampler, monkeypatch):
    short = sampler._settings.sampler.model_copy(update={"step_deadline_s": 1.0})
    monkeypatch.setattr(sampler, "_settings", sampler._settings.model_copy(update={"sampler": short}))
    with ThreadPoolExecutor(1) as pool:
        with hung(sampler, monkeypatch):
            time.sleep(1.5)
            assert sampler.healthy(), "nothing runs"
            asked = pool.submit(one, sampler, "one", PROMPTS[0])
            deadline = time.monotonic() + 60
            while sampler.healthy():
                assert time.monotonic() < deadline, "it was not noticed in 60 s"
                time.sleep(0.05)
            assert not asked.done()
        assert len(asked.result(60).tokens) == 12
    assert sampler.healthy()
