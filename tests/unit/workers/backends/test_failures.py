from __future__ import annotations

import pytest
import torch

from workers.backends import failures
from workers.backends.failures import StallDetector, lost_device, ran_out_of_memory


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    return now


def test_what_does_not_run_does_not_stand_still(clock: list[float]):
    still = StallDetector()
    still.progress()
    clock[0] += 50
    assert still.seconds == 0
    with still.call():
        clock[0] += 5
        assert still.seconds == 5
    clock[0] += 50
    assert still.seconds == 0


def test_calls_that_overlap_stand_still_since_any_of_them_moved(clock: list[float]):
    still = StallDetector()
    with still.call():
        clock[0] += 10
        with still.call():
            assert still.seconds == 10, "one that comes moves nothing"
            clock[0] += 10
            still.progress()
            clock[0] += 3
            assert still.seconds == 3
        clock[0] += 4
        assert still.seconds == 7


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_failed_allocation_is_known_whichever_library_made_it(error: Exception):
    assert ran_out_of_memory(error)


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_another_error_is_no_failed_allocation(kind: type[RuntimeError]):
    assert not ran_out_of_memory(kind("CUDA error: an illegal memory access was encountered"))


def test_a_device_is_lost_by_its_own_error_unless_an_allocation_failed():
    assert lost_device(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not lost_device(torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"))
    assert not lost_device(RuntimeError("CUDA error: an illegal memory access was encountered"))
