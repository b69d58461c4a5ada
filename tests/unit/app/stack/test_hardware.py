"""The hardware that workers can use is found, and the workers of a layout have room on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings, Settings, TrainerSettings
from app.stack import hardware, placement
from app.stack.hardware import Gpu, Hardware, layout

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-89aa0000-77c2-4e5b-9f1c-1f3a5b7c9d0e")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a driver with two GPUs, and its nvidia-smi."""
    for number, uuid in enumerate(UUIDS):
        gpu = tmp_path / "gpus" / f"0000:{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {H100}\nIRQ:   \t\t 150\nGPU UUID: \t {uuid}\n")
    answers(
        tmp_path / "gpus",
        f"0, 00000000:00:00.0, {H100}, 81559, 40000, {UUIDS[0]}",
        f"1, 00000000:3B:00.0, {H100}, 40960, 500, {UUIDS[1]}",
    )
    monkeypatch.setattr(hardware, "NVIDIA_SMI", str(tmp_path / "nvidia-smi"))
    monkeypatch.setattr(hardware, "torch_is_for_cpus", lambda: False)
    return tmp_path / "gpus"


def answers(driver: Path, *rows: str, code: int = 0) -> None:
    """Makes nvidia-smi print these rows."""
    smi = driver.parent / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows) + f"exit {code}\n")
    smi.chmod(0o755)


def gpus(count: int, gib: int = 80) -> Hardware:
    return Hardware(tuple(Gpu(number, "H100", gib * GIB) for number in range(count)), 8, 64 * GIB, bfloat16=True)


def placed(found: Hardware, weights: int) -> list[tuple[TrainerSettings | SamplerSettings]]:
    """The sections of a base model with the layout for `found`, after `tinsmith up` gave them its GPUs."""
    parts = layout(found, weights)
    base = BaseModelSettings(
        name="m", path="m", trainer=TrainerSettings(**parts.trainer), sampler=SamplerSettings(**parts.sampler)
    )
    numbers = [gpu.number for gpu in found.gpus]
    (done,) = placement.place(Settings(base_models=(base,)), lambda: numbers).base_models
    placement.check(Settings(base_models=(done,)))
    return [done.trainer, done.sampler]


def test_gpus_have_the_memory_that_nvidia_smi_tells(driver: Path):
    found = hardware.find({}, driver)
    assert [str(gpu) for gpu in found.gpus] == [
        "GPU 0: NVIDIA H100 80GB HBM3, 79.6 GiB",
        "GPU 1: NVIDIA H100 80GB HBM3, 40.0 GiB",
    ]
    assert [gpu.number for gpu in hardware.find({"CUDA_VISIBLE_DEVICES": "1"}, driver).gpus] == [1]


def test_a_container_has_the_gpus_that_nvidia_smi_lists_whatever_the_drivers_folder_has(driver: Path):
    answers(driver, f"0, 00000000:3B:00.0, {H100}, 81559, 4, {UUIDS[0]}")
    assert hardware.visible_gpus({}, driver) == (0,), "by CDI: the folder has all GPUs of the host"
    assert [gpu.address for gpu in hardware.nvidia_gpus(driver)] == ["0000:3b:00.0"]
    answers(driver, "0, 00000000:01:00.0, NVIDIA GeForce RTX 4090, 24564, 900, GPU-1")
    found = hardware.find({}, driver / "no folder")
    assert found.lines() == ["GPU 0: NVIDIA GeForce RTX 4090, 24.0 GiB"], "WSL 2"


@pytest.mark.parametrize(("rows", "code"), [((), 9), (("Failed to initialize NVML",), 0), ((f"0, 1, {H100}",), 0)])
def test_gpus_without_an_answer_of_nvidia_smi_have_no_memory_known(driver: Path, rows: tuple[str, ...], code: int):
    answers(driver, *rows, code=code)
    assert hardware.find({}, driver).lines()[0] == "GPU 0: NVIDIA H100 80GB HBM3"
    (driver.parent / "nvidia-smi").unlink()
    found = hardware.find({"CUDA_VISIBLE_DEVICES": "0"}, driver)
    assert found.lines() == ["GPU 0: NVIDIA H100 80GB HBM3"]
    assert layout(found, 400 * GIB).reasons == ("Trainer and sampler share the GPU.",)


def test_gpus_that_other_programs_use_come_last(driver: Path):
    assert hardware.emptiest_first((0, 1)) == (1, 0)
    assert hardware.used_bytes() == {0: 40000 * 2**20}, "some hundred MiB are the driver's own"
    answers(driver, f"0, 00000000:3B:00.0, {H100}, 81559, [N/A], {UUIDS[0]}")
    assert hardware.emptiest_first((1, 0)) == (1, 0) and hardware.find({}, driver).gpus[0].memory_bytes
    (driver.parent / "nvidia-smi").unlink()
    assert hardware.emptiest_first((3, 1)) == (3, 1)


@pytest.mark.parametrize(
    ("listed", "torch", "found"),
    [
        (None, "2.11.0", (0, 1, 2)),
        ("5, 2", "2.11.0+cu128", (5, 2)),
        ("", "2.11.0", ()),
        ("-1", "2.11.0", ()),
        ("0,-1,1", "2.11.0", (0,)),
        (None, "2.11.0+cpu", ()),
    ],
)
def test_the_gpus_are_those_of_the_driver_or_of_the_environment_unless_torch_is_a_cpu_build(
    listed: str | None, torch: str, found: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "version", {"torch": torch}.__getitem__)
    for address in ("0000:19:00.0", "0000:3b:00.0", "0000:4c:00.0"):
        (tmp_path / address).mkdir()
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert hardware.visible_gpus(environ, tmp_path) == found
    assert hardware.visible_gpus({}, tmp_path / "no driver") == ()


@pytest.mark.parametrize("smi", [True, False], ids=["nvidia-smi", "driver"])
@pytest.mark.parametrize(
    ("listed", "found"), [(f"{UUIDS[1]},{UUIDS[0]}", (1, 0)), ("GPU-89a, 0", (1, 0)), ("GPU-8932f937", (0,))]
)
def test_gpus_may_be_given_by_their_uuids_as_slurm_does(
    listed: str, found: tuple[int, ...], smi: bool, driver: Path
) -> None:
    if not smi:
        (driver.parent / "nvidia-smi").unlink()
    assert hardware.visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, driver) == found


@pytest.mark.parametrize("name", ["GPU-89", "GPU-8932f938", "MIG-8932f937"], ids=["of two", "unknown", "slice"])
def test_a_name_that_is_not_one_whole_gpus_is_a_setup_error(name: str, driver: Path) -> None:
    said = rf"CUDA_VISIBLE_DEVICES is '0,{name}', and {name} is not the UUID of one GPU of `nvidia-smi -L`; list whole"
    with pytest.raises(SetupError, match=said):
        hardware.visible_gpus({"CUDA_VISIBLE_DEVICES": f"0,{name}"}, driver)


@pytest.mark.parametrize(("flags", "said"), [("sse2 avx512_bf16", "with "), ("amx_bf16", "with "), ("fma", "without ")])
def test_without_a_gpu_the_cpu_is_described(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 3)
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t\t: {flags}\n")
    found = hardware.find({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, tmp_path / "cpuinfo")
    (line,) = found.lines()
    assert line.startswith("no GPU that torch can use; CPU: 3 cores, ") and line.endswith(
        f"{said}instructions for bfloat16"
    )
    parts = layout(found, GIB)
    assert (parts.trainer, parts.sampler) == ({}, {})


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("weights", [0, 2 * GIB, 30 * GIB, 70 * GIB, 140 * GIB])
def test_every_layout_has_room_on_the_gpus(count: int, weights: int):
    trainer, sampler = placed(gpus(count), weights)
    assert trainer.devices and sampler.devices


@pytest.mark.parametrize(
    ("count", "weights", "ranks", "zero_stage", "samplers", "parts"),
    [
        (1, 16, 1, 2, 1, 1),
        (2, 16, 1, 2, 1, 1),
        (8, 16, 4, 2, 4, 1),
        (7, 16, 3, 2, 4, 1),
        (8, 48, 4, 2, 4, 1),  # 0.6 of the GPU
        (8, 49, 4, 3, 2, 2),
        (8, 140, 4, 3, 1, 4),
    ],
)
def test_gpus_are_halved_and_a_base_that_is_too_large_for_one_is_divided(
    count: int, weights: int, ranks: int, zero_stage: int, samplers: int, parts: int
):
    trainer, sampler = placed(gpus(count), weights * GIB)
    assert (trainer.ranks, trainer.zero_stage) == (ranks, zero_stage)
    assert (sampler.count, sampler.tensor_parallel) == (samplers, parts)
    assert len(layout(gpus(count), weights * GIB).reasons) == 1


@pytest.mark.parametrize(("count", "gib"), [(1, 22), (2, 49), (3, 49), (8, 200)])
def test_a_base_that_fits_nowhere_is_warned_of(count: int, gib: int):
    assert f"The weights have {gib}.0 GiB, which may be too much" in layout(gpus(count), gib * GIB).reasons[-1]
