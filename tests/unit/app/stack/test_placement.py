from __future__ import annotations

from typing import Any

import pytest

from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings, Settings, TrainerSettings
from app.stack.placement import check, place


def base_model(name: str = "small", **sections: Any) -> BaseModelSettings:
    return BaseModelSettings(name=name, path="org/name", **sections)


def settings(**sections: Any) -> Settings:
    return Settings(base_models=(base_model(**sections),))


def devices(placed: Settings) -> dict[str, Any]:
    return {
        f"{base.name} {name}": section.devices
        for base in placed.base_models
        for name, section in base.workers.items()
        if section.devices
    }


# GPUs that are named.


@pytest.mark.parametrize(
    "trainer",
    [
        TrainerSettings(devices=(0,), ranks=2),
        TrainerSettings(devices=(0, 0), ranks=2),
        TrainerSettings(devices=(0, 0)),
        TrainerSettings(devices=((1, 2), (0,)), ranks=2, count=2),
        TrainerSettings(devices=(0, 0, 1), hostfile="hosts"),
    ],
)
@pytest.mark.parametrize("section", ["trainer", "full"])
def test_each_rank_needs_a_gpu_of_its_own_where_gpus_are_named(trainer: TrainerSettings, section: str) -> None:
    said = rf"base model 'small': {section}\.devices gives one worker \[0.*\], .* name as many GPUs, each once"
    with pytest.raises(SetupError, match=said):
        check(settings(**{section: trainer}))


def test_a_sampler_needs_as_many_gpus_as_its_engine_splits_the_model_over() -> None:
    sampler = SamplerSettings(devices=(0, 1), count=2, tensor_parallel=2)
    with pytest.raises(SetupError, match=r"sampler\.devices gives one worker \[0\], but its settings need 2"):
        check(settings(sampler=sampler))


def test_devices_that_do_not_fit_count_are_named_with_their_base_model() -> None:
    with pytest.raises(SetupError, match=r"base model 'small': sampler\.devices is \[0\], which sampler\.count = 2"):
        check(settings(sampler=SamplerSettings(devices=(0,), count=2)))


def test_gpus_for_all_ranks_are_fine_and_those_of_other_hosts_are_not_looked_at() -> None:
    check(settings(trainer=TrainerSettings(devices=(0, 1), ranks=2)))
    check(settings(trainer=TrainerSettings(devices=(0, 1), ranks=4, hostfile="hosts")))


def two_bases(sampler: SamplerSettings, *, hostfile: str = "") -> Settings:
    """A trainer takes half of GPU 0, and a sampler of another base model takes its share."""
    trainer = TrainerSettings(devices=(0,), memory_share=0.5, hostfile=hostfile)
    return Settings(base_models=(base_model(trainer=trainer), base_model("other", full_sampler=sampler)))


@pytest.mark.parametrize(
    "sampler",
    [
        SamplerSettings(devices=(0,), memory_share=0.6),
        SamplerSettings(devices=((0,), (0,)), memory_share=0.3, count=2),
        SamplerSettings(devices=((1,), (1, 0)), memory_share=0.6, count=2),
        SamplerSettings(devices=(0,), memory_share=0.1, engine_args={"gpu_memory_utilization": 0.6}),
    ],
)
def test_a_gpu_that_is_shared_out_beyond_its_memory_is_named_with_who_shares_it(sampler: SamplerSettings) -> None:
    said = (
        r"GPU [01] add .*0\.6 by full_sampler\.memory_share of 'other'|GPU 1 add .*1\.2 by full_sampler\.memory_share"
    )
    with pytest.raises(SetupError, match=said):
        check(two_bases(sampler))


def test_gpus_with_room_for_all_that_name_them_are_fine() -> None:
    check(two_bases(SamplerSettings(devices=(0,), memory_share=0.5)))
    check(two_bases(SamplerSettings(devices=(1,), memory_share=0.6)))
    check(two_bases(SamplerSettings(devices=(1, 2), memory_share=0.6, count=2)))
    check(two_bases(SamplerSettings(devices=(0,), memory_share=0.9), hostfile="hosts"))
    check(settings(full=TrainerSettings()))


# GPUs that are not named.


def test_no_two_workers_share_a_gpu_by_themselves() -> None:
    placed = place(
        Settings(
            base_models=(
                base_model("a", trainer=TrainerSettings(ranks=2), sampler=SamplerSettings(count=2)),
                base_model("b", full=TrainerSettings(), full_sampler=SamplerSettings(tensor_parallel=2)),
            )
        ),
        lambda: range(10),
    )
    assert devices(placed) == {
        "a trainer": ((0, 1),),
        "a sampler": ((2,), (3,)),
        "b trainer": ((4,),),
        "b full": ((5,),),
        "b sampler": ((6,),),
        "b full_sampler": ((7, 8),),
    }
    check(placed)


def test_workers_keep_off_the_gpus_that_others_name_and_off_those_that_are_not_visible() -> None:
    sampler = SamplerSettings(devices=(4,))
    placed = place(
        settings(sampler=sampler, full=TrainerSettings(hostfile="hosts", devices=(2, 3))), lambda: range(2, 8)
    )
    assert devices(placed) == {"small trainer": ((5,),), "small sampler": (4,), "small full": (2, 3)}


def test_memory_shares_with_room_let_workers_share_a_gpu_when_none_is_free() -> None:
    half = {"trainer": TrainerSettings(memory_share=0.45), "sampler": SamplerSettings(memory_share=0.45)}
    assert devices(place(settings(**half), lambda: [0])) == {"small trainer": ((0,),), "small sampler": ((0,),)}
    assert devices(place(settings(**half), lambda: [0, 1])) == {"small trainer": ((0,),), "small sampler": ((1,),)}


@pytest.mark.parametrize("gpus", [[0], [0, 1]])
def test_too_few_gpus_are_a_setup_error_that_says_who_has_them_and_how_to_share_one(gpus: list[int]) -> None:
    with pytest.raises(SetupError) as caught:
        place(settings(sampler=SamplerSettings(count=2)), lambda: gpus)
    said = str(caught.value)
    assert "no room on this machine's GPUs for sampler (count = 2, GPUs for each: 1, memory_share = 0.85)" in said
    assert "GPU 0 has 1 by trainer.memory_share of 'small'" in said and "lower memory_share" in said


def test_ranks_of_a_hostfile_say_which_gpus_they_use_before_others_get_any() -> None:
    spread = TrainerSettings(hostfile="hosts", ranks=16)
    with pytest.raises(SetupError, match=r"name their GPUs in trainer\.devices"):
        place(settings(trainer=spread), lambda: range(8))
    named = settings(trainer=spread, sampler=SamplerSettings(devices=(0,)))
    assert place(named, lambda: range(8)) == named
    everywhere = spread.model_copy(update={"devices": tuple(range(8))})
    with pytest.raises(SetupError, match="no room"):
        place(settings(trainer=everywhere), lambda: range(8))


def test_without_a_gpu_nothing_is_placed_and_nobody_counts_them_where_all_are_named() -> None:
    assert place(settings(), list) == settings()
    named = settings(trainer=TrainerSettings(devices=(0,)), sampler=SamplerSettings(devices=(1,)))
    assert place(named, lambda: pytest.fail("counted")) == named


# A sampler that takes turns with its trainer.


def in_turns(trainer: TrainerSettings | None = None, **sampler: Any) -> BaseModelSettings:
    trainer = trainer or TrainerSettings(memory_share=0.9)
    return base_model(trainer=trainer, sampler=SamplerSettings(backend="vllm", sleep=True, **sampler))


def test_a_sampler_that_sleeps_gets_its_trainers_gpu_and_the_larger_of_their_shares_counts() -> None:
    free = base_model("free", trainer=TrainerSettings(count=0), sampler=SamplerSettings(memory_share=0.1))
    placed = place(Settings(base_models=(in_turns(memory_share=0.7), free)), lambda: [4])
    check(placed)
    assert devices(placed) == {"small trainer": ((4,),), "small sampler": ((4,),), "free sampler": ((4,),)}
    larger = base_model("larger", trainer=TrainerSettings(count=0), sampler=SamplerSettings(memory_share=0.2))
    with pytest.raises(SetupError, match="no room"):
        place(Settings(base_models=(in_turns(memory_share=0.7), larger)), lambda: [4])


def test_a_sampler_that_sleeps_gets_gpus_that_its_trainer_names_also_where_its_share_is_the_larger() -> None:
    trainer = TrainerSettings(devices=(2, 1), ranks=2, memory_share=0.5)
    placed = place(Settings(base_models=(in_turns(trainer, memory_share=0.6),)), lambda: range(8))
    check(placed)
    assert devices(placed) == {"small trainer": (2, 1), "small sampler": ((2,),)}
    third = base_model("third", trainer=TrainerSettings(devices=(2,), memory_share=0.45))
    with pytest.raises(
        SetupError, match=r"GPU 2 add .* 0\.5 by trainer\.memory_share .* 0\.1 by sampler\.memory_share"
    ):
        check(placed.model_copy(update={"base_models": (*placed.base_models, third)}))


def test_the_full_trainer_and_its_sampler_take_turns_too() -> None:
    full = TrainerSettings(devices=(0,), memory_share=0.9)
    sampler = SamplerSettings(backend="vllm", sleep=True, devices=(0,), memory_share=0.9)
    check(settings(full=full, full_sampler=sampler))
    with pytest.raises(SetupError, match="GPU 0 add up"):
        check(settings(full=full, full_sampler=sampler.model_copy(update={"sleep": False})))


@pytest.mark.parametrize(
    "base",
    [
        in_turns(TrainerSettings(devices=(0,)), devices=(1,)),
        in_turns(TrainerSettings(), devices=(0,)),
        in_turns(TrainerSettings(), tensor_parallel=2),
    ],
)
def test_a_sampler_that_sleeps_on_other_gpus_than_its_trainer_is_refused(base: BaseModelSettings) -> None:
    with pytest.raises(SetupError, match=r"sampler\.sleep is true, so the sampler uses GPUs of the trainer"):
        check(Settings(base_models=(base,)))


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({"sampler": SamplerSettings(sleep=True)}, r'sampler\.backend = "auto"'),
        ({"sampler": SamplerSettings(sleep=True, backend="transformers")}, r'sampler\.backend = "transformers"'),
        ({"sampler": SamplerSettings(sleep=True, backend="vllm", count=2)}, r"sampler\.count = 2"),
        (
            {"trainer": TrainerSettings(count=2), "sampler": SamplerSettings(sleep=True, backend="vllm")},
            r"trainer\.count = 2",
        ),
        (
            {"trainer": TrainerSettings(hostfile="hosts"), "sampler": SamplerSettings(sleep=True, backend="vllm")},
            r"trainer\.hostfile",
        ),
        ({"full_sampler": SamplerSettings(sleep=True, backend="vllm")}, r"full\.count = 0"),
        (
            {"sampler": SamplerSettings(sleep=True, backend="vllm", engine_args={"enable_sleep_mode": False})},
            r"sampler\.engine_args\.enable_sleep_mode",
        ),
    ],
)
def test_a_sampler_that_cannot_take_turns_is_refused_by_the_setting_that_prevents_it(
    sections: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(SetupError, match=rf"base model 'small': .*\.sleep is for .* does not go with {wrong};"):
        base_model(**sections).check_turns()


def test_a_sampler_that_does_not_sleep_or_does_not_start_takes_no_turns() -> None:
    for sampler in (SamplerSettings(count=2), SamplerSettings(sleep=True, count=0)):
        base = base_model(sampler=sampler)
        base.check_turns()
        assert not base.takes_turns(full=False)
    assert in_turns().takes_turns(full=False)
    assert not in_turns().takes_turns(full=True)
