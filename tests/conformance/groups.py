"""Groups of ranks, two unless more are wanted.

On a CPU each rank is forked from a process that has imported torch, DeepSpeed and the backends, which takes 7 s.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import torch

from tests import forkserver
from tests.servers import free_port

DEADLINE_S = 600


def run_group(main: Callable[..., object], *arguments: str, size: int = 2) -> list[int | None]:
    """Exit codes of the ranks that run it; None for a rank that did not end in time."""
    # No fork of the forkserver can use GPUs after DeepSpeed was imported there (tests/forkserver.py).
    context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else forkserver.context()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place = {"WORLD_SIZE": str(size), **address, "OMP_NUM_THREADS": "1"}
    places = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    ranks = [context.Process(target=_run, args=(place, main, arguments)) for place in places]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(DEADLINE_S)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _run(place: dict[str, str], main: Callable[..., object], arguments: tuple[str, ...]) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read before the fork
    main(*arguments)
