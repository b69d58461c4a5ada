"""The bare side of `ddp`: the model and step of bare_loop under torch's DistributedDataParallel, over gloo.

`python -m ops.bench.ddp_loop MODEL_FOLDER`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ops.bench import bare_loop, ddp, real_step, side, timing


def prepare() -> Callable[[int], list[float]]:
    """Prepares rank 0 and returns measure(count): ms of each step."""
    step = _step()

    def measure(count: int) -> list[float]:
        dist.broadcast(torch.tensor(count), 0)
        return [timing.timed_ms(step) for _ in range(count)]

    return measure


def _follow() -> None:
    step = _step()
    while True:
        count = torch.tensor(0)
        dist.broadcast(count, 0)
        for _ in range(int(count)):
            step()


def _step() -> Callable[[], None]:
    """A step on this rank's share of the batch. Gradients are all-reduced with the last micro-batch alone."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(bare_loop.adapted(sys.argv[1]))
    optimizer = bare_loop.optimizer(model)
    tokens = torch.from_numpy(real_step.tokens(vocab_size=1000)).long()
    share = tokens.chunk(ddp.RANKS)[dist.get_rank()]
    micro_batches = torch.split(share, bare_loop.MICRO_BATCH_ROWS)

    def step() -> None:
        for i, rows in enumerate(micro_batches, start=1):
            with nullcontext() if i == len(micro_batches) else model.no_sync():
                (model(input_ids=rows, labels=rows, use_cache=False).loss / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    side.serve_ranks(ddp.RANKS, "ops.bench.ddp_loop", prepare, _follow)
