"""The hardware of this machine that workers can use, and the settings of workers that fit it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from app.errors import SetupError
from app.stack.memory import gib, usable_bytes, usable_cores
from app.stack.terminal import counted

_CPU_FILE = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""The NVIDIA driver's folder, with a folder for each GPU."""
NVIDIA_SMI = "nvidia-smi"
_QUERY = ("--query-gpu=index,pci.bus_id,name,memory.total,memory.used,uuid", "--format=csv,noheader,nounits")
_QUERY_S = 30
_IDS = ("GPU-", "MIG-")
# An idle GPU reports some hundred MiB of the driver, and a desktop takes as much.
_IN_USE = 2**30
SHARED = 0.45
"""The memory share of a trainer and a sampler on one GPU. The rest is for CUDA itself."""
# Of a worker's memory: the rest is for activations, adapters and the KV cache.
_MOST_WEIGHTS = 0.6


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by nvidia-smi's number. `memory_bytes` and `used_bytes` are 0 where nvidia-smi does not report them."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int = 0
    address: str = ""
    """On the PCI bus: numbers differ between containers."""
    uuid: str = ""
    """Such as GPU-8932f937-d72c-4106-c12f-20bd9faed9f6; empty if it is not known."""

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


def find(environ: Mapping[str, str] = os.environ, driver: Path = NVIDIA_GPUS, cpu_file: Path = _CPU_FILE) -> Hardware:
    """Finds the hardware. Raises SetupError as `visible_gpus` does."""
    numbers = visible_gpus(environ, driver)
    known = {gpu.number: gpu for gpu in nvidia_gpus(driver)} if numbers else {}
    return Hardware(
        tuple(known.get(number, Gpu(number, "NVIDIA GPU", 0)) for number in numbers),
        usable_cores(),
        usable_bytes(),
        bool(_BF16_FLAGS & set(cpu_file.read_text().split())),
    )


def nvidia_gpus(driver: Path = NVIDIA_GPUS) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process has: those that nvidia-smi lists or, without its answer, those in the driver's
    folder. In a container that folder may list all of the host's GPUs, and WSL 2 has none."""
    return _by_nvidia_smi() or tuple(
        Gpu(
            number,
            _information(folder, "Model") or "NVIDIA GPU",
            0,
            address=folder.name,
            uuid=_information(folder, "GPU UUID"),
        )
        for number, folder in enumerate(sorted(driver.glob("*")))
    )


def visible_gpus(environ: Mapping[str, str], driver: Path = NVIDIA_GPUS) -> tuple[int, ...]:
    """Returns the numbers of the GPUs that workers may use: those in CUDA_VISIBLE_DEVICES, or else all.

    CUDA ends that list at the first name of no GPU, such as -1. None beside a CPU build of torch. Raises SetupError for
    a MIG slice there, and for an unknown UUID.
    """
    if torch_is_for_cpus():
        return ()
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(gpu.number for gpu in nvidia_gpus(driver))
    names = list(takewhile(_names_gpu, map(str.strip, listed.split(","))))
    gpus = nvidia_gpus(driver) if any(name.startswith(_IDS) for name in names) else ()
    return tuple(_number(name, gpus, listed) for name in names)


def _names_gpu(name: str) -> bool:
    return name.isdigit() or name.startswith(_IDS)


def _number(name: str, gpus: Sequence[Gpu], listed: str) -> int:
    if name.isdigit():
        return int(name)
    if (gpu := by_name(name, gpus)) is not None:
        return gpu.number
    raise SetupError(
        f"CUDA_VISIBLE_DEVICES is {listed!r}, and {name} is not the UUID of one GPU of `nvidia-smi -L`; list whole "
        "GPUs there, by their numbers or UUIDs: MIG slices are not supported"
    )


def by_name(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Returns the GPU that CUDA_VISIBLE_DEVICES names so; None for no GPU, and for the beginning of several UUIDs."""
    found = [gpu for gpu in gpus if is_named(name, str(gpu.number), gpu.uuid)]
    return found[0] if len(found) == 1 else None


def is_named(name: str, number: str, uuid: str) -> bool:
    """True if CUDA_VISIBLE_DEVICES may name a GPU so: by nvidia-smi's number, or by its UUID or the beginning of it."""
    return name == number or (name.startswith("GPU-") and uuid.startswith(name))


def hides_all_gpus(environ: Mapping[str, str]) -> bool:
    """True if CUDA_VISIBLE_DEVICES names no GPU, such as '' and -1."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    return listed is not None and not _names_gpu(listed.partition(",")[0].strip())


def torch_is_for_cpus() -> bool:
    """True for a CPU build of torch, which uses no GPU."""
    return version("torch").endswith("+cpu")


def used_bytes() -> dict[int, int]:
    """The bytes of memory that processes use on each GPU where it is 1 GiB or more; none without nvidia-smi."""
    return {gpu.number: gpu.used_bytes for gpu in _by_nvidia_smi() if gpu.used_bytes >= _IN_USE}


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


def _by_nvidia_smi() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; none without its answer."""
    try:
        output = subprocess.run(
            (NVIDIA_SMI, *_QUERY), capture_output=True, text=True, check=True, timeout=_QUERY_S
        ).stdout
        return tuple(map(_of_row, output.splitlines()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _of_row(row: str) -> Gpu:
    number, address, name, total, used, uuid = row.split(", ")
    # The driver's folders have four digits of the PCI domain, nvidia-smi has eight: 00000000:3B:00.0.
    address = address.lower()[-len("0000:00:00.0") :]
    return Gpu(int(number), name, _mebibytes(total), _mebibytes(used), address, uuid)


def _mebibytes(text: str) -> int:
    """The bytes of a number of mebibytes, or 0 where nvidia-smi has no number."""
    return int(text) * 2**20 if text.isdigit() else 0


def _information(folder: Path, field: str) -> str:
    """A field of a GPU's file of the driver, such as NVIDIA H100 80GB HBM3 for Model; empty without it."""
    try:
        found = re.search(rf"^{field}:\s*(.+?)\s*$", (folder / "information").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else ""
