"""Settings of workers that could only fail later, or give other results, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import SetupError
from app.settings.files import load
from app.settings.workers import SPECULATION, BaseModelSettings, SamplerSettings, TrainerSettings
from tests.hosts import FIRST, SECOND, write_hostfile


@pytest.mark.parametrize("section", ["sampler", "full_sampler"])
@pytest.mark.parametrize("name", SPECULATION)
def test_speculative_decoding_is_refused_by_the_argument_that_turns_it_on(tmp_path: Path, section: str, name: str):
    file = tmp_path / "tinsmith.toml"
    value = '{ method = "ngram" }' if name == "speculative_config" else "3"
    file.write_text(
        f'[[base_models]]\nname = "base"\npath = "/m"\n[base_models.{section}]\nengine_args = {{ {name} = {value} }}\n'
    )
    with pytest.raises(SetupError, match=rf"base_models\.0\.{section}\.engine_args: remove {name}: .*JSON schema"):
        load(file)


def test_other_engine_arguments_and_those_that_turn_it_off_are_passed_on():
    args = {"seed": 1, "spec_tokens": 0, "speculative_config": {}}
    assert SamplerSettings(engine_args=args).engine_args == args


def test_the_id_that_others_find_a_base_model_under_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    for path in (str(tmp_path / "weights"), "weights", "~nobody/weights", "/not/on/this/machine", "./not/here"):
        assert BaseModelSettings(name="org/base:peft:262144", path=path).hub_id == "org/base", path
    assert BaseModelSettings(name="org/alias", path="org/base").hub_id == "org/base", "others cannot load the alias"


def test_a_hostfile_gives_slots_by_host_in_its_order(tmp_path: Path) -> None:
    hosts = TrainerSettings(ranks=3, hostfile=str(write_hostfile(tmp_path / "hosts", 2, 1))).slots()
    assert list(hosts.items()) == [(FIRST, 2), (SECOND, 1)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file"),
        ("one slots=1\ntwo slots=2\n", r"trainer.ranks is 2 .* 3 slots \(one 1, two 2\)"),
        ("one slots=1\none slots=1\n", "'one slots=1' is not"),
        ("one\n", "'one' is not"),
        ("one slots=0\n", "'one slots=0' is not"),
        ("", r"0 slots \(none\)"),
    ],
)
def test_a_hostfile_that_is_not_of_that_many_ranks_is_a_setup_error(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(SetupError, match=why):
        TrainerSettings(ranks=2, hostfile=str(tmp_path / "hosts")).slots()


def test_a_worker_of_full_fine_tunes_has_the_settings_of_its_own_section_and_one_model() -> None:
    base = BaseModelSettings(name="a", path="o/a", full=TrainerSettings(ranks=2), full_sampler=SamplerSettings(count=3))
    assert base.for_full().trainer == TrainerSettings(ranks=2, max_models=1)
    assert base.for_full_sampler().sampler == SamplerSettings(count=3)


def test_a_worker_of_full_fine_tunes_without_its_section_is_a_setup_error() -> None:
    base = BaseModelSettings(name="a", path="o/a")
    with pytest.raises(SetupError, match=r"'a' has no section \[base_models\.full\] in"):
        base.for_full()
    with pytest.raises(SetupError, match=r"'a' has no section \[base_models\.full_sampler\] in"):
        base.for_full_sampler()
