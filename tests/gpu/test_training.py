"""Training on a GPU: placement, kernels, waits of the host, and memory that runs out. `make gpu-check` runs other tiers
too."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.domain.ops import ForwardBackward, LoraSpec
from app.domain.results import Done, ForwardBackwardOutput
from app.errors import UserOpError
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised
from tests.parity.training import LENGTHS, apply, open_trainer, run, state
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

_BOUND = """
import sys
from workers.cli import bind_gpus
bind_gpus([int(sys.argv[2])])
import torch
from pathlib import Path
from tests.parity.training import apply, open_trainer
from app.domain.ops import LoraSpec
from workers.backends.training.base import Create
trainer = open_trainer(Path(sys.argv[1]), "bfloat16")
apply(trainer, "m", Create(LoraSpec(rank=4)))
weights = [*trainer._engine.base.model.parameters(), *trainer._states["m"].adapter.tensors.values()]
places = {str(torch.cuda.get_device_properties(weight.device).uuid) for weight in weights}
print(torch.cuda.device_count(), *places)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture
def trainer(base: Path) -> Iterator[Trainer]:
    trainer = open_trainer(base, "bfloat16", micro_batch_tokens=2**14)
    assert apply(trainer, "m", Create(LoraSpec(rank=4))) == Done()
    yield trainer
    trainer.close("m")


def test_base_and_adapter_are_on_the_gpu_with_nvidia_smis_number(base: Path) -> None:
    for package in ("celery", "redis", "tomli_w", "prometheus_client"):
        pytest.importorskip(package, reason=f"needs {package}, for workers.cli")
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    *_, (number, uuid) = enumerate(listed.stdout.split())
    command = [sys.executable, "-c", _BOUND, str(base), str(number)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert found.split() == ["1", uuid.removeprefix("GPU-")]


def test_the_host_waits_for_the_gpu_thrice_in_a_pass_of_one_micro_batch(trainer: Trainer) -> None:
    """As `tests/budgets` counts on a stand-in."""
    op = ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy")
    run(trainer, "m", op)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            run(trainer, "m", op)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [str(wait.message) for wait in waits if "synchroniz" in str(wait.message)]
    assert len(found) <= 3, found


def test_a_layer_has_at_most_120_kernels_forward_and_backward(tmp_path: Path) -> None:
    """With fused kernels: transformers' own norms, rotary embeddings and gates would make them 217."""
    pytest.importorskip("liger_kernel", reason="needs liger_kernel, for the fused kernels")
    few, many = (_kernels(tiny_qwen3(tmp_path / str(layers), num_hidden_layers=layers)) for layers in (2, 4))
    assert many - few <= 2 * 120


def _kernels(base: Path) -> int:
    trainer = open_trainer(base, "bfloat16", micro_batch_tokens=2**14)
    assert trainer.describe()["fused_kernels"]
    apply(trainer, "m", Create(LoraSpec(rank=8)))
    op = ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy")
    run(trainer, "m", op)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(trainer, "m", op)
        torch.cuda.synchronize()
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)


def test_an_op_too_large_for_the_gpu_fails_alone_and_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    """It takes more than the 4 MiB that are left to it beside the weights."""
    small = ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy")
    run(trainer, "m", small)
    large = ForwardBackward(batch(supervised(1, (2**13,))), "cross_entropy")
    before = state(trainer, "m", tmp_path / "before")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**22) / total)
    try:
        assert isinstance(apply(trainer, "m", large), UserOpError)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert state(trainer, "m", tmp_path / "after") == before
    assert isinstance(apply(trainer, "m", small), ForwardBackwardOutput)
