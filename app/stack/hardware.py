"""The hardware of this machine that workers can use, and the settings of workers that fit it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from app.stack import placement
from app.stack.memory import gib, usable_bytes
from app.stack.terminal import counted

_CPU_FILE = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_QUERY = ("nvidia-smi", "--query-gpu=index,memory.total,memory.used", "--format=csv,noheader,nounits")
# An idle GPU reports some hundred MiB of the driver, and a desktop takes as much.
_IN_USE = 2**30
SHARED = 0.45
"""The memory share of a trainer and a sampler on one GPU. The rest is for CUDA itself."""
# Of a worker's memory: the rest is for activations, adapters and the KV cache.
_MOST_WEIGHTS = 0.6


class _Memory(NamedTuple):
    """Bytes of a GPU's memory, in all and in use."""

    total: int
    used: int


_UNKNOWN = _Memory(0, 0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by nvidia-smi's number. `memory_bytes` is 0 where nvidia-smi does not report it."""

    number: int
    name: str
    memory_bytes: int

    def __str__(self) -> str:
        memory = f", {gib(self.memory_bytes)}" if self.memory_bytes else ""
        return f"GPU {self.number}: {self.name}{memory}"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs that workers use (none: they use the CPU), the cores and the bytes of memory of this process, and
    `bfloat16`, which is true if the CPU has instructions for it."""

    gpus: tuple[Gpu, ...]
    cores: int
    memory_bytes: int
    bfloat16: bool

    def lines(self) -> list[str]:
        """A line for each GPU, or one for the CPU."""
        has = "with" if self.bfloat16 else "without"
        cpu = f"CPU: {self.cores} cores, {gib(self.memory_bytes)} of memory, {has} instructions for bfloat16"
        return [str(gpu) for gpu in self.gpus] or [f"no GPU that torch can use; {cpu}"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Values for the sections `trainer` and `sampler` of a base model, and a sentence on each choice."""

    trainer: Mapping[str, Any]
    sampler: Mapping[str, Any]
    reasons: tuple[str, ...]


def find(
    environ: Mapping[str, str] = os.environ, driver: Path = placement.NVIDIA_GPUS, cpu_file: Path = _CPU_FILE
) -> Hardware:
    """Finds the hardware. Raises SetupError as `placement.visible_gpus` does."""
    numbers = placement.visible_gpus(environ, driver)
    names = dict(enumerate(placement.gpu_models(driver)))
    memory = _gpu_memory() if numbers else {}
    return Hardware(
        tuple(Gpu(number, names.get(number, "NVIDIA GPU"), memory.get(number, _UNKNOWN).total) for number in numbers),
        len(os.sched_getaffinity(0)),
        usable_bytes(),
        bool(_BF16_FLAGS & set(cpu_file.read_text().split())),
    )


def used_bytes() -> dict[int, int]:
    """The bytes of memory that processes use on each GPU where it is 1 GiB or more; none without nvidia-smi."""
    return {number: memory.used for number, memory in _gpu_memory().items() if memory.used >= _IN_USE}


def emptiest_first(numbers: Sequence[int]) -> tuple[int, ...]:
    """The GPUs by the memory that is in use on them: other programs may use some. Equal ones keep their order."""
    used = used_bytes() if numbers else {}
    return tuple(sorted(numbers, key=lambda number: used.get(number, 0)))


def layout(hardware: Hardware, weights: int) -> Layout:
    """Divides the GPUs between one trainer and its samplers. `weights`: bytes of the base model's files, 0 if they are
    not known.

    Two GPUs and more are halved. ZeRO stage 3 and tensor parallelism divide a base that one of them cannot hold.
    """
    gpus = len(hardware.gpus)
    if not gpus:
        return Layout({}, {}, ("Trainer and sampler use the CPU.",))
    memory = min(gpu.memory_bytes for gpu in hardware.gpus) or weights / _MOST_WEIGHTS
    if gpus == 1:
        fits = weights <= _MOST_WEIGHTS * SHARED * memory or not hardware.gpus[0].memory_bytes
        share = {"memory_share": SHARED}
        return Layout(share, share, ("Trainer and sampler share the GPU.", *_warning(weights, fits)))
    ranks, rest = gpus // 2, gpus - gpus // 2
    parts = next((size for size in _powers(rest) if weights <= _MOST_WEIGHTS * memory * size), _powers(rest)[-1])
    whole = weights <= _MOST_WEIGHTS * memory
    fits = whole or (ranks > 1 and weights <= _MOST_WEIGHTS * memory * min(ranks, parts))
    trainer = {"ranks": ranks} | ({} if whole or ranks == 1 else {"zero_stage": 3})
    sampler = {"count": rest // parts} | ({} if parts == 1 else {"tensor_parallel": parts})
    samplers = f"{counted(rest // parts, 'sampler')} on {counted(parts, 'GPU')} each"
    said = f"{counted(ranks, 'GPU')} for the trainer, {samplers}."
    return Layout(trainer, sampler, (said, *_warning(weights, fits)))


def _warning(weights: int, fits: bool) -> tuple[str, ...]:
    if fits:
        return ()
    return (
        f"The weights have {gib(weights)}, which may be too much for this: docs/scaling.md has other layouts, and "
        "docs/quantized-bases.md has bases in 4 and 8 bits.",
    )


def _powers(most: int) -> list[int]:
    """The powers of two up to `most`, from 1."""
    return [2**power for power in range(most.bit_length())]


def _gpu_memory() -> dict[int, _Memory]:
    """The memory by GPU; none without nvidia-smi."""
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=30).stdout
        rows = [line.split(",") for line in output.splitlines()]
        return {int(number): _Memory(int(total) * 2**20, _mebibytes(used)) for number, total, used in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _mebibytes(text: str) -> int:
    """The bytes of a number of mebibytes, or 0 where nvidia-smi has no number."""
    return int(text) * 2**20 if text.strip().isdigit() else 0
