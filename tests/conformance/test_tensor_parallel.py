"""Ranks that split the frozen base's layers compute what one process computes, and the same bits each time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import SetupError
from app.settings import BaseModelSettings
from tests.conformance import routed_ranks, split_ranks, training_ranks
from tests.conformance.groups import run_group
from tests.conformance.test_sequence_parallel import built, of_one
from tests.parity import architectures
from tests.parity.reference import relative_error
from workers.backends.training import backends
from workers.backends.training.sequence_parallel import ModelParallelGroup

FAMILIES = (
    *("llama", "llama, tied head", "mistral, window", "ministral3", "qwen2", "qwen3", "granite", "cohere", "smollm3"),
    *("gemma", "gemma2", "gemma3", "gemma4"),
    *("qwen3-moe", "mixtral", "glm4-moe"),
)


def settings(base: Path, **trainer: Any) -> BaseModelSettings:
    trainer = {"micro_batch_tokens": 64, "ranks": 2, "tensor_parallel": 2, **trainer}
    return BaseModelSettings(name=base.parent.name, path=str(base), dtype="float32", trainer=trainer)


def prepare(case: str, folder: Path) -> Path:
    """Writes a base and its trained adapters, for the scenario of tests/conformance/split_ranks.py."""
    base = built(case, folder / "base")
    split_ranks.write_trained(of_one(base), folder / "trained")
    return base


def run_ranks(bases: list[Path], size: int) -> list[int | None]:
    """Runs the scenario on each base in one group, on as many ranks as split the layers. Returns their exit codes."""
    of_all = [settings(base, ranks=size, tensor_parallel=size).model_dump(mode="json") for base in bases]
    folder = bases[0].parents[1]
    return run_group(split_ranks.main, json.dumps(of_all), str(folder), size=size)


def found_in(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "found.npz") as stored:
        return dict(stored)


def test_ranks_that_split_the_layers_equal_one_process(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """In one group for all families. An error ends it, so the first family without results is at fault."""
    ended = run_ranks([prepare(case, tmp_path / case) for case in FAMILIES], 2)
    for case in FAMILIES:
        with subtests.test(case):
            check_split(tmp_path / case, 2)
    assert ended == [0, 0]


def test_four_ranks_of_which_two_have_the_same_key_value_head_compute_what_one_computes(tmp_path: Path) -> None:
    assert run_ranks([prepare("qwen3", tmp_path / "qwen3")], 4) == [0] * 4
    check_split(tmp_path / "qwen3", 4)


def check_split(folder: Path, ranks: int) -> None:
    alone = of_one(folder / "base")
    wanted = split_ranks.run(alone, folder / "trained", folder / "alone")
    gradients = [name for name in wanted if name.startswith("grad")]
    assert all(np.abs(wanted[name]).max() > 1e-4 for name in gradients), "a gradient counts for nothing"
    check_equal(found_in(folder), wanted, 1e-5)
    held = json.loads((folder / "describe.json").read_text())["base_elements_held"]
    model = alone._engine.base.model
    of_layers = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    whole = alone.describe()["base_elements_held"]
    assert 1 / ranks <= (held - whole + of_layers) / of_layers < 1 / ranks + 0.04


@pytest.mark.parametrize(
    ("case", "trainer"),
    [
        ("qwen3", {"zero_stage": 0, "activation_checkpointing": True}),
        ("qwen3-moe", {"zero_stage": 1, "activation_checkpointing": True}),
        # Four ranks for two key-value heads.
        ("qwen3-moe", {"zero_stage": 2, "ranks": 4, "tensor_parallel": 4}),
        # Two pairs: where a pass has an odd number of micro-batches, one pair keeps step without work.
        ("gemma3", {"zero_stage": 2, "ranks": 4}),
    ],
)
def test_ranks_that_split_the_layers_train_critics_and_go_on_from_files(
    tmp_path: Path, case: str, trainer: dict[str, Any]
) -> None:
    base = built(case, tmp_path / "base")
    wanted = training_ranks.run(of_one(base), tmp_path / "checkpoint")
    (tmp_path / "split").mkdir()
    text = settings(base, **trainer).model_dump_json()
    size = trainer.get("ranks", 2)
    assert run_group(training_ranks.main, text, str(tmp_path / "split"), "stay", size=size) == [0] * size
    with np.load(tmp_path / "split" / "found.npz") as stored:
        found = dict(stored)
    check_equal(found, wanted, 1e-3)
    early = [name for name in wanted if name.startswith(("first", "turn 0", "look 0", "grad 0"))]
    check_equal({name: found[name] for name in early}, {name: wanted[name] for name in early}, 1e-5)


def check_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], most: float) -> None:
    """Single numbers are compared as if they were 1 at least: a loss may be a difference of greater ones."""
    assert found.keys() == wanted.keys()
    numbers = {name for name, value in wanted.items() if value.ndim == 0}
    assert relative_error(*({n: v for n, v in one.items() if n not in numbers} for one in (found, wanted))) < most
    for name in numbers:
        assert abs(found[name] - wanted[name]) <= most * max(1.0, abs(wanted[name])), name


def test_ranks_that_split_the_layers_take_the_routes_of_all_tokens(tmp_path: Path) -> None:
    base = architectures.build("qwen3-moe", tmp_path / "base")
    wanted = routed_ranks.run(of_one(base, router_replay=True))
    text = settings(base).model_copy(update={"router_replay": True}).model_dump_json()
    (tmp_path / "split").mkdir()
    assert run_group(routed_ranks.main, text, str(tmp_path / "split")) == [0, 0]
    with np.load(tmp_path / "split" / "found.npz") as found:
        check_equal(dict(found), wanted, 1e-5)


def test_ranks_that_split_the_layers_give_the_same_bits_again(tmp_path: Path) -> None:
    prepare("qwen3-moe", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for name in ("one", "other"):
        assert run_ranks([tmp_path / name / "base"], 2) == [0, 0]
    one, other = (
        {name: value.tobytes() for name, value in found_in(tmp_path / folder).items()} for folder in ("one", "other")
    )
    assert one == other


@pytest.mark.parametrize(
    ("case", "shape", "size", "reason"),
    [
        ("llama", {}, 3, "its 4 heads and 2 key-value heads cannot be shared by 3 ranks"),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "its 12 heads and 3 key-value heads cannot be shared by 4 ranks",
        ),
        ("helium (unlisted)", {}, 2, "its datums are padded"),
        ("gemma3, vision", {}, 2, "it reads images"),
        ("qwen3.5", {}, 2, "it has layers that must see a datum from its first token on"),
        ("phi3", {}, 2, "transformers has no plan that splits model.layers.0.self_attn.o_proj as it needs"),
        ("olmo2", {}, 2, "transformers has no plan that splits model.layers.0.self_attn.q_proj as it needs"),
        (
            "cohere",
            {"use_qk_norm": True},
            2,
            "transformers has no plan that splits model.layers.0.self_attn.q_norm as it needs",
        ),
        ("gpt-oss", {}, 2, "transformers has no plan that splits model.layers.0.self_attn.q_proj as it needs"),
        (
            "llama",
            {"intermediate_size": 97},
            2,
            "model.layers.0.mlp.gate_proj has out_features = 97, which cannot be divided by it",
        ),
        (
            "qwen3-moe",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            3,
            "model.layers.0.mlp.experts has num_experts = 4, which cannot be divided by it",
        ),
    ],
)
def test_a_model_whose_layers_ranks_cannot_split_is_refused(
    tmp_path: Path, case: str, shape: dict[str, int], size: int, reason: str
) -> None:
    base = settings(architectures.build(case, tmp_path, **shape), ranks=size, tensor_parallel=size)
    with pytest.raises(SetupError) as refused:
        backends.split_layers(base, ModelParallelGroup(0, size))
    assert str(refused.value).endswith(f"cannot run with trainer.tensor_parallel = {size}: {reason}")
