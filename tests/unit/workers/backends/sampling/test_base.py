from __future__ import annotations

import numpy as np
import pytest

from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings
from workers.backends.sampling.base import alternatives_seed, check_devices, choose, create, sample_seed


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
    assert choose(asked, gpus, vllm=vllm) == backend
    assert caplog.messages == []


def test_a_gpu_without_vllm_gets_transformers_and_one_line_with_the_command_that_installs_it(caplog):
    assert choose("auto", 2, vllm=False) == "transformers"
    [line] = caplog.messages
    assert 'pip install "tinsmith[vllm]"' in line and "make setup GPU=1" in line


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(0, r"sampler.devices is \[0, 1\], but torch sees no GPU here"), (1, r"sees only 1 of them here")],
)
def test_a_gpu_that_is_not_there_is_a_setup_error(gpus, said):
    with pytest.raises(SetupError, match=said):
        check_devices(("0", "1"), gpus)


def test_gpus_that_are_there_are_fine_and_none_need_be_named():
    check_devices(("0", "1"), 2)
    check_devices((), 0)


def test_a_sampler_misses_only_gpus_of_its_own_part_of_the_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    both = BaseModelSettings(name="tiny", path="x", sampler=SamplerSettings(count=2, devices=(0, 1, 2, 3)))
    with pytest.raises(SetupError, match=r"sampler\.devices is \[2, 3\], but torch sees no GPU here"):
        create(both)


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_missing_model_is_a_setup_error_that_names_the_path(backend, tmp_path):
    with pytest.raises(SetupError, match="nowhere"):
        create(settings(backend, str(tmp_path / "nowhere"))).open()


def test_no_two_samples_of_any_seeds_have_the_same_random_numbers():
    """SeedSequence splits its numbers into words of 32 bits and pads them with zeros, so some pairs would be the same
    words."""
    words = (0, 1, 2, 5, 7, 2**32 - 1)
    seeds = [low + high * 2**32 for low in words for high in words]
    streams = [sample_seed(seed, index) for seed in seeds for index in words]
    streams += [alternatives_seed(seed) for seed in seeds]
    assert len({stream.generate_state(2, np.uint64).tobytes() for stream in streams}) == len(streams)


def test_samples_of_seeds_below_two_to_the_32_are_those_of_earlier_versions():
    for seed, index in ((0, 0), (3, 1), (2**32 - 1, 5), (3, 2**32)):
        earlier = np.random.SeedSequence([seed, index])
        assert sample_seed(seed, index).generate_state(4).tolist() == earlier.generate_state(4).tolist()
