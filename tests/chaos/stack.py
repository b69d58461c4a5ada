"""The stack that is killed: plain-torch trainers and the light sampler.

With them, processes die here and not kernels.
"""

from __future__ import annotations

from pathlib import Path

from tests.contract.stack import Stack
from tests.servers import free_port

TRAINERS = 3
LEASE_S = 2.0
# One sequence at a time: in a batch, the last bits of its logprobs would depend on the other sequences.
_SAMPLER = 'backend = "transformers"\nmax_batch = 1'
# More threads than cores only make a stopped trainer's share unpredictable; one thread also repeats on any machine.
_THREADS = 1


def engine(lease_s: float = LEASE_S) -> str:
    return f"[engine]\nlease_s = {lease_s}\nring_again_s = 1.0\nsnapshot_share = 0.05"


def light(folder: Path, base: Path) -> Stack:
    """Starts three one-rank trainers and a sampler, with data in `folder`/data."""
    trainer = f'backend = "torch"\ncount = {TRAINERS}'
    return _stack(folder, base, trainer)


def merging(folder: Path, base: Path) -> Stack:
    """Starts two trainers with cross-model batching."""
    return _stack(folder, base, 'backend = "torch"\ncount = 2\nexact = false')


def ranked(folder: Path, base: Path) -> Stack:
    """Starts one DeepSpeed trainer of two ranks, which live and die together."""
    return _stack(folder, base, 'backend = "deepspeed"\nzero_stage = 2\nranks = 2')


def _stack(folder: Path, base: Path, trainer: str) -> Stack:
    return Stack(
        folder / "data",
        base,
        free_port(),
        trainer,
        _SAMPLER,
        engine(),
        program="tests.warm_ranks",
        threads=_THREADS,
    )
