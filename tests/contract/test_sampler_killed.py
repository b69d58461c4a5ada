"""A sampler with free batching is killed: no sample is lost or reported twice, and nearly all tokens are the same.

The other requests of a batch change the rounding of logprobs, so a draw at the edge of two tokens may differ.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import psutil
import pytest
import tinker

from tests.contract.data import train
from tests.contract.stack import Stack
from tests.contract.test_restart import await_true, children, is_gone
from tests.contract.test_samplers import TRIES, ask, completions_of, drawn

REQUESTS, TOKENS = 200, 16
# Logprobs are within 1e-3 in fp32 (docs/sampling.md), so at most 1e-3 of a draw's probability falls to another token:
# of 16 draws at most one request in 60 has another text, of 200 requests 3.2 on average. That 11 have is a chance of
# 0.0005.
MATCH_RATE = 0.95


def engine_memory(stack: Stack) -> set[Path]:
    """Shared memory of the sampler's engine, as recorded by the sampler."""
    [note] = (stack.data_dir / "run").glob("sampler-0@*.shared-memory")
    return {Path("/dev/shm", name) for name in json.loads(note.read_text())}


def kill_sampler(stack: Stack) -> None:
    """Kills the sampler; its engine's processes end by themselves, because the supervisor is stopped meanwhile."""
    assert stack.process is not None
    supervisor = psutil.Process(stack.process.pid)
    [sampler] = children(stack, "--name sampler")
    engine = sampler.children(recursive=True)
    assert len(engine) >= 2
    supervisor.suspend()
    try:
        sampler.kill()
        await_true(lambda: all(is_gone(process) for process in engine))
    finally:
        supervisor.resume()


# For transformers, test_samplers.py asks for more: the same bits.
@pytest.mark.parametrize("stack", ["deepspeed-2-ranks-vllm"], indirect=True)
def test_all_requests_of_a_killed_sampler_end_once_and_nearly_all_with_the_same_tokens(
    training: tinker.TrainingClient, stack: Stack
):
    train(training, 3)
    client = training.save_weights_and_get_sampling_client().result()
    expected = [drawn(future) for future in [ask(client, seed, TOKENS) for seed in range(REQUESTS)]]
    for _ in range(TRIES):
        segments = engine_memory(stack)
        assert sum(segment.stat().st_size for segment in segments) > 2**20
        with completions_of(stack, client) as done:
            futures = [ask(client, seed, TOKENS) for seed in range(REQUESTS)]
            await_true(lambda done=done: len(done()) >= REQUESTS // 10)
            kill_sampler(stack)
            in_the_middle = len(done()) < REQUESTS
            found = [drawn(future) for future in futures]
            await_true(lambda done=done: len(done()) >= REQUESTS)
        assert Counter(done()) == Counter(set(done()))
        assert len(done()) == REQUESTS
        assert not [segment for segment in segments if segment.exists()]
        same = sum(mine[0] == theirs[0] for mine, theirs in zip(found, expected, strict=True))
        print(f"{same} of {REQUESTS} have the tokens of the undisturbed run")
        assert same >= MATCH_RATE * REQUESTS
        if in_the_middle:
            return
    raise AssertionError("it was never killed in the middle")
