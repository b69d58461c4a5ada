from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops import scaling
from ops.gpu_check import shapes
from ops.scaling import Machine, Model, Rank, Settings

GPU = json.loads((Path(scaling.__file__).parent / "bench" / "results" / "gpu.json").read_text())["figures"]


@pytest.mark.parametrize("page", scaling.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_code(page: Path) -> None:
    text = page.read_text()
    assert scaling.PAGES[page]() in text, "run `python -m ops.scaling`"
    assert scaling.written(page) == text


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("Llama-3-70B", 70.6, 70.6), ("Qwen3-235B-A22B", 235, 22), ("Qwen3-32B", 32.8, 32.8)],
)
def test_a_model_has_as_many_weights_as_its_name_says(name: str, billions: float, active: float) -> None:
    """A token is multiplied with those that are active: four operations for each, forward and backward."""
    model = Model(scaling.CONFIGS[name])
    assert model.layer * model.layers + model.rest == pytest.approx(billions * 1e9, rel=0.01)
    assert model.flops(Settings(rank=0), 0) == pytest.approx(4 * active * 1e9, rel=0.05)


def test_operations_are_counted_as_for_the_measured_mfu() -> None:
    config = shapes.config("8B")
    found = Model(config).flops(Settings(rank=shapes.RANK), 8192)
    assert found == pytest.approx(shapes.step_flops(config, [8192]) / 8192, rel=1e-6)


@pytest.mark.parametrize("tokens", [8192, 32_768])
def test_a_rank_takes_what_an_h200_measured(tokens: int) -> None:
    machine = Machine("H200", 1, GPU["device"]["memory_gib"] * 2**30)
    rank = Rank(Model(shapes.config("8B")), machine, Settings(rank=shapes.RANK))
    again = rank.again(tokens)
    assert again is not None
    found = rank.base() + rank.adapter() + rank.head(tokens) + rank.activations(tokens, again)
    measured = GPU["8B"]["tinsmith"][f"{tokens // 1024}k"]["peak_gib"] * 2**30
    assert 1 <= found / measured < 1.2
