from __future__ import annotations

import pytest

from app.errors import SetupError
from app.settings import SamplerSettings, TrainerSettings, parse
from app.settings.gpus import Devices, gpus_of_copies


@pytest.mark.parametrize(
    ("devices", "count", "copies"),
    [
        ((0, 1), 1, ((0, 1),)),
        ((7, 6, 5, 4, 3, 2, 1, 0), 8, ((7,), (6,), (5,), (4,), (3,), (2,), (1,), (0,))),
        ((4, 5, 6, 7), 2, ((4, 5), (6, 7))),
        (((0,), (2,)), 2, ((0,), (2,))),
        (((0, 1), (0, 1)), 2, ((0, 1), (0, 1))),
        (((3, 1),), 1, ((3, 1),)),
        ((), 3, ((), (), ())),
        ((0, 1), 0, ()),
        (((0,), (2,)), 0, ()),
    ],
)
def test_each_copy_has_its_own_list_or_an_equal_part_of_one_list(
    devices: Devices, count: int, copies: tuple[tuple[int, ...], ...]
) -> None:
    assert gpus_of_copies("sampler", devices, count) == copies


def test_lists_for_more_or_fewer_copies_are_a_setup_error() -> None:
    said = r"sampler\.devices is \[\[0\], \[1\]\], but sampler\.count is 1; give it a list of GPUs for each copy"
    with pytest.raises(SetupError, match=said):
        gpus_of_copies("sampler", ((0,), (1,)), 1)


def test_one_list_that_the_copies_cannot_divide_is_a_setup_error_that_shows_how_to_share_it() -> None:
    said = r"full\.devices is \[0\], which full\.count = 2 copies cannot divide equally; .* such as \[\[0\], \[0\]\]"
    with pytest.raises(SetupError, match=said):
        gpus_of_copies("full", (0,), 2)


def settings(devices: object) -> SamplerSettings:
    raw = {"base_models": [{"name": "a", "path": "o/a", "sampler": {"devices": devices}}]}
    return parse(raw, "the file").base_models[0].sampler


def test_a_config_file_has_one_list_or_a_list_for_each_copy() -> None:
    assert [settings(value).devices for value in ([], [2, 0], [[2, 0], [1]])] == [(), (2, 0), ((2, 0), (1,))]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("all", r"^the file: base_models\.0\.sampler\.devices: Input should be a list \(got 'all'\)$"),
        ([[]], r"devices\.0: .*List should have at least 1 item"),
        ([-1], r"devices\.0: Input should be greater than or equal to 0"),
        ([[0], 1], r"devices\.1: Input should be a list \(got 1\)"),
    ],
)
def test_other_values_are_setup_errors(devices: object, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        settings(devices)


def test_vllms_own_arguments_count_for_the_gpus_and_memory_of_a_sampler() -> None:
    args = {"pipeline_parallel_size": 3, "data_parallel_size": 2, "gpu_memory_utilization": 0.5}
    sampler = SamplerSettings(tensor_parallel=2, engine_args=args)
    assert (sampler.gpus_needed, sampler.gpu_share) == (12, 0.5)
    assert (SamplerSettings().gpus_needed, SamplerSettings().gpu_share) == (1, 0.85)
    assert TrainerSettings(ranks=4, memory_share=0.3).gpus_needed == 4
