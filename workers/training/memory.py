"""Telling a pass that was too large for this machine's memory from one that is broken."""

from __future__ import annotations

import torch


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: on a GPU torch has a class for it; on a CPU, a RuntimeError of its allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
