"""The devices on which the ranks of a backend run: a check of them, their names, and copies for which the host does not
wait."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from app.errors import SetupError
from app.stack.hardware import NVIDIA_GPUS, hides_all_gpus, nvidia_gpus
from workers.backends.failures import ran_out_of_memory


def names(kind: str, ranks: int = 1) -> list[str]:
    """Returns a name for each rank on this machine: "cpu", or a GPU by the number or id that it is bound to
    (workers/cli.py), or else by its place among the GPUs that torch sees."""
    if kind == "cpu":
        return ["cpu"] * ranks
    bound = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = bound.split(",") if bound else map(str, range(ranks))
    return [f"{kind}:{number.strip()}" for number in list(numbers)[:ranks]]


def check_gpus(driver: Path = NVIDIA_GPUS) -> None:
    """Raises SetupError, with torch's reason, if the NVIDIA driver has GPUs and a CUDA build of torch can use none of
    them. Without this check the worker would use the CPU, and nobody would know. A CUDA_VISIBLE_DEVICES that names no
    GPU turns it off."""
    wanted = torch.version.cuda is not None and not hides_all_gpus(os.environ)
    if not wanted or torch.cuda.is_available() or not nvidia_gpus(driver):
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it gives no reason"
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
    raise SetupError(
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use this machine's GPUs: {reason}. Update the "
        "NVIDIA driver (CUDA 13 needs 580 or later), name devices that exist, give the container its GPUs, or set "
        "CUDA_VISIBLE_DEVICES to '' to use the CPU"
    )


def have_bfloat16() -> bool:
    """Returns whether all GPUs that torch sees compute in bfloat16 (compute capability 8.0, Ampere). Older ones emulate
    it."""
    return all(torch.cuda.get_device_capability(gpu) >= (8, 0) for gpu in range(torch.cuda.device_count()))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on `device`, the same tensor if that is the CPU. The host does not wait for the copy: a GPU
    may be busy with a whole pass."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def copied(
    tensors: Mapping[str, Tensor], *, pinned: bool = False, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Copies tensors of one device to the CPU, contiguous, in `dtype` or else in their own.

    A GPU casts a tensor before it copies it, if it has the memory.

    With `pinned` the host waits once: a GPU copies into pinned memory, and the host waits only for one number more, as
    the stream has done all copies by then. torch keeps such memory for later copies and rounds each tensor up to a
    power of two, so it is for adapters and not for full models.
    """
    found = {name: _copy(tensor.detach(), pinned, dtype or tensor.dtype) for name, tensor in tensors.items()}
    if pinned:
        for tensor in [*tensors.values()][-1:]:
            tensor.detach().flatten()[:1].cpu()
    return found


def free_pinned() -> None:
    """Frees the pinned host memory that torch keeps of tensors that are gone: 39 GB after a datum of 131,072 tokens of
    an 8B model whose layers' inputs lay there. It is too slow for each pass, since the next one would pin it again."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a CPU build of torch lacks the function
        torch._C._host_emptyCache()


def _copy(tensor: Tensor, pinned: bool, dtype: torch.dtype) -> Tensor:
    if not tensor.is_cpu:
        try:
            return _to_host(tensor.to(dtype), pinned, dtype)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
    # Where the GPU has no memory for the cast, or the host none that is pinned, torch copies first and the CPU casts.
    return _to_host(tensor, False, dtype)


def _to_host(tensor: Tensor, pinned: bool, dtype: torch.dtype) -> Tensor:
    return tensor.to("cpu", dtype, non_blocking=pinned, copy=True, memory_format=torch.contiguous_format)
