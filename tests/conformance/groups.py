"""Groups of ranks, two unless more are wanted.

On a CPU each rank is forked from a process that has imported torch, DeepSpeed and the backends, which takes 7 s.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import torch

from tests.servers import free_port

DEADLINE_S = 600
_HEAVY = [
    *("deepspeed", "safetensors.torch", "torch.distributed.tensor"),
    "deepspeed.runtime.zero.muon.original_muon",  # what ZeRO up to stage 2 imports, and with it torch's compiler
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
    "workers.backends.training.backends",
    "tests.frozen",
]


def run_group(main: Callable[..., object], *arguments: str, size: int = 2) -> list[int | None]:
    """Exit codes of the ranks that run it; None for a rank that did not end in time."""
    # DeepSpeed asks for GPUs when it is imported, and a process that has done so cannot use them in its forks.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(_HEAVY)
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
