"""Names of the devices on which the ranks of a backend run."""

from __future__ import annotations

import os


def names(kind: str, ranks: int = 1) -> list[str]:
    """Returns a name for each rank on this machine: "cpu", or a GPU by the number or id that it is bound to
    (workers/cli.py), or else by its place among the GPUs that torch sees."""
    if kind == "cpu":
        return ["cpu"] * ranks
    bound = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = bound.split(",") if bound else map(str, range(ranks))
    return [f"{kind}:{number.strip()}" for number in list(numbers)[:ranks]]
