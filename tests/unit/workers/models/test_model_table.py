"""docs/models.md says of each family what the parity cases and the code say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.backends.sampling.transformers import kv_cache
from workers.models import base_model, experts, lora
from workers.models.images import FAMILIES
from workers.models.target_modules import undecided

_DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"
_CELLS = re.findall(r"^\| `(\w+)` \| (.+) \|$", _DOCUMENT.read_text(), re.MULTILINE)
ROWS = {name: cells.split(" | ") for name, cells in _CELLS}


def test_each_family_with_a_parity_case_has_one_row() -> None:
    families = {name for name, _ in architectures.CASES.values()}
    assert sorted(name for name, _ in _CELLS) == sorted(families), "change the table in docs/models.md"


@pytest.mark.parametrize("case", architectures.CASES)
def test_a_row_has_the_familys_groups_datums_sampler_and_images(case: str, tmp_path: Path) -> None:
    config = architectures.config_of(case)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = base_model.auto_class(config).from_config(config)
    assert undecided(model, experts.found(model)) == []
    groups, datums, sampler, _, images = ROWS[architectures.CASES[case][0]]
    assert groups == ", ".join(group for group, paths in lora.targets(model).items() if paths)
    assert datums == ("padded" if "(unlisted)" in case else "packed")
    assert sampler == "tested"
    kv_cache.check_samples(BaseModelSettings(name="q", path=str(tmp_path)))
    read = "tested" if config.model_type in FAMILIES else "text alone"
    assert images == (read if "vision_config" in config.to_dict() else "–")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_which_test_runs_the_family_in_vllm(name: str) -> None:
    def families(cases: Iterable[str]) -> set[str]:
        return {architectures.CASES[case][0] for case in cases}

    served = families(architectures.VLLM)
    always = families(architectures.VLLM_ALWAYS) | {"Qwen2", "Qwen3"}  # tests/conformance has these two
    assert ROWS[name][3] == ("tested" if name in always else "`make families`" if name in served else "not tested")
