from __future__ import annotations

import pytest
import torch

from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings
from workers.backends.sampling.backends import check_devices, choose, create


def settings(backend: str, path: str = "x") -> BaseModelSettings:
    return BaseModelSettings(name="tiny", path=path, sampler=SamplerSettings(backend=backend))


def test_the_sampler_is_the_one_the_settings_name_and_auto_means_transformers_on_a_cpu():
    names = {backend: type(create(settings(backend))).__name__ for backend in ("auto", "transformers", "vllm")}
    assert names == {"auto": "TransformersSampler", "transformers": "TransformersSampler", "vllm": "VllmSampler"}


@pytest.mark.parametrize(
    ("asked", "gpus", "vllm", "backend"),
    [
        ("auto", 1, True, "vllm"),
        ("auto", 0, True, "transformers"),
        ("auto", 0, False, "transformers"),
        ("vllm", 1, False, "vllm"),
        ("transformers", 1, True, "transformers"),
    ],
)
def test_auto_is_vllm_on_a_gpu_where_it_is_installed(asked, gpus, vllm, backend, caplog):
    assert choose(asked, gpus, vllm=vllm, bfloat16=True) == backend
    assert caplog.messages == []


def test_a_gpu_without_vllm_gets_transformers_and_one_line_with_the_command_that_installs_it(caplog):
    assert choose("auto", 2, vllm=False, bfloat16=True) == "transformers"
    [line] = caplog.messages
    assert 'pip install "tinsmith[vllm]"' in line and "make setup GPU=1" in line


def test_a_gpu_that_does_not_compute_in_bfloat16_gets_transformers_and_one_line(caplog, monkeypatch):
    for name, found in {"is_available": True, "device_count": 2, "get_device_capability": (7, 5)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    assert type(create(settings("auto"))).__name__ == "TransformersSampler"
    [line] = caplog.messages
    assert line.startswith("a GPU of compute capability below 8.0 does not compute in bfloat16")


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(0, r"sampler.devices is \[0, 1\], but torch sees no GPU here"), (1, r"sees only 1 of them here")],
)
def test_a_gpu_that_is_not_there_is_a_setup_error(gpus, said):
    with pytest.raises(SetupError, match=said):
        check_devices(("0", "1"), gpus, 2)


def test_fewer_gpus_than_a_sampler_needs_are_a_setup_error_where_none_is_named():
    with pytest.raises(SetupError, match="needs 2 GPUs, but torch sees only 1 here"):
        check_devices((), 1, 2)


def test_gpus_that_are_there_are_fine_and_none_need_be_named():
    check_devices(("0", "1"), 2, 2)
    check_devices((), 4, 2)
    check_devices((), 0, 2)


def test_a_sampler_misses_only_gpus_of_its_own_part_of_the_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    both = BaseModelSettings(name="tiny", path="x", sampler=SamplerSettings(count=2, devices=(0, 1, 2, 3)))
    with pytest.raises(SetupError, match=r"sampler\.devices is \[2, 3\], but torch sees no GPU here"):
        create(both)


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_missing_model_is_a_setup_error_that_names_the_path(backend, tmp_path):
    with pytest.raises(SetupError, match="nowhere"):
        create(settings(backend, str(tmp_path / "nowhere"))).open()
