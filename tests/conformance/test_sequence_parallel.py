"""Ranks that share the tokens of each micro-batch compute what one process computes, and the same bits each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import SetupError
from app.settings import BaseModelSettings
from tests.conformance import full_ranks, routed_ranks, training_ranks
from tests.conformance.groups import run_group
from tests.parity import architectures
from tests.parity.reference import relative_error
from workers.backends.training import backends, sequence_parallel
from workers.backends.training.ranks import RankGroup
from workers.backends.training.sequence_parallel import ModelParallelGroup
from workers.backends.training.trainer import Trainer

# Layers of 4 and of 2 key-value heads.
SHAPES = {"gemma4": {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}}


def built(case: str, folder: Path) -> Path:
    return architectures.build(case, folder, **SHAPES.get(case, {}))


def settings(base: Path, **trainer: Any) -> BaseModelSettings:
    trainer = {"micro_batch_tokens": 64, **trainer}
    return BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer)


def of_ranks(base: Path, folder: Path, ranks: int = 2, **trainer: Any) -> dict[str, np.ndarray]:
    """Runs the scenario of tests/conformance/training_ranks.py, with several tenants in a pass, on pairs of ranks."""
    folder.mkdir()
    text = settings(base, ranks=ranks, sequence_parallel=2, **trainer).model_dump_json()
    assert run_group(training_ranks.main, text, str(folder), "stay", size=ranks) == [0] * ranks
    with np.load(folder / "found.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize(
    ("case", "trainer"),
    [
        ("gemma2", {"zero_stage": 0, "activation_checkpointing": True}),
        ("gpt-oss", {"zero_stage": 2}),
        ("qwen3-moe", {"zero_stage": 3}),
        ("gemma4", {"zero_stage": 2}),
        # Two pairs: where a pass has an odd number of micro-batches, one pair keeps step without work.
        ("llama", {"zero_stage": 2, "ranks": 4}),
    ],
)
def test_ranks_that_share_each_datum_equal_one_process(tmp_path: Path, case: str, trainer: dict[str, Any]) -> None:
    base = built(case, tmp_path / "base")
    wanted = training_ranks.run(of_one(base), tmp_path / "checkpoint")
    check_equal(of_ranks(base, tmp_path / "shared", **trainer), wanted, ("first", "turn 0", "look 0", "grad 0"))


def test_ranks_that_share_each_datum_equal_one_process_in_full_fine_tuning(tmp_path: Path) -> None:
    base = architectures.build("llama", tmp_path / "base")
    wanted = full_ranks.run(of_one(base, full=True), tmp_path / "checkpoint")
    text = settings(base, zero_stage=0, ranks=2, sequence_parallel=2).model_dump_json()
    (tmp_path / "shared").mkdir()
    assert run_group(full_ranks.main, text, str(tmp_path / "shared")) == [0, 0]
    with np.load(tmp_path / "shared" / "found.npz") as stored:
        check_equal(dict(stored), wanted, ("turn 0", "grad 0", "step 0"))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_ranks_that_share_each_datum_take_the_routes_of_its_tokens(tmp_path: Path, zero_stage: int) -> None:
    check_routed(tmp_path, zero_stage=zero_stage, ranks=2, sequence_parallel=2)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_ranks_with_datums_of_their_own_take_the_routes_of_these(tmp_path: Path, zero_stage: int) -> None:
    check_routed(tmp_path, zero_stage=zero_stage, ranks=2, micro_batch_tokens=16)


def check_routed(tmp_path: Path, **trainer: Any) -> None:
    """The ranks' logprobs, gradients and loads of experts are those of one process."""
    base = architectures.build("qwen3-moe", tmp_path / "base")
    wanted = routed_ranks.run(of_one(base, router_replay=True))
    text = settings(base, **trainer).model_copy(update={"router_replay": True}).model_dump_json()
    (tmp_path / "shared").mkdir()
    assert run_group(routed_ranks.main, text, str(tmp_path / "shared")) == [0, 0]
    with np.load(tmp_path / "shared" / "found.npz") as found:
        assert found.keys() == wanted.keys()
        assert relative_error(dict(found), wanted) < 1e-5
    other = wanted["plain a logprobs"] - wanted["routed a logprobs"]
    assert np.abs(other).max() > 1e-3, "the routes count for nothing"


def test_ranks_that_share_each_datum_give_the_same_bits_again(tmp_path: Path) -> None:
    base = architectures.build("llama", tmp_path / "base")
    one, other = (of_ranks(base, tmp_path / name, zero_stage=2) for name in ("one", "other"))
    assert {name: value.tobytes() for name, value in one.items()} == {
        name: value.tobytes() for name, value in other.items()
    }


def of_one(base: Path, *, full: bool = False, router_replay: bool = False) -> Trainer:
    torch.set_num_threads(1)
    alone = settings(base, backend="torch").model_copy(update={"router_replay": router_replay})
    backend = backends.create(alone, full=full)
    backend.open()
    return backend


def check_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], first: tuple[str, ...]) -> None:
    """Results named as in `first` come before any step."""
    assert found.keys() == wanted.keys()
    early = {name: value for name, value in wanted.items() if name.startswith(first)}
    assert relative_error({name: found[name] for name in early}, early) < 1e-5
    # Adam divides a gradient by its own size, so rounding in tiny gradients grows with every step.
    assert relative_error(found, wanted) < 1e-3


@pytest.mark.parametrize(
    ("case", "size", "packed", "reason"),
    [
        ("llama", 4, True, "its 4 heads and 2 key-value heads cannot be shared by 4 ranks"),
        ("gemma4", 4, True, "its 4 heads and 2 key-value heads cannot be shared by 4 ranks"),
        ("llama", 2, False, "its datums are padded"),
        ("qwen3-vl", 2, True, "it reads images"),
        ("qwen3.5", 2, True, "it has layers that must see a datum from its first token on"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    tmp_path: Path, case: str, size: int, packed: bool, reason: str
) -> None:
    model = of_one(built(case, tmp_path))._engine.base.model
    with pytest.raises(SetupError) as refused:
        sequence_parallel.check(model, size, packed=packed)
    assert str(refused.value) == f"{type(model).__name__} cannot run with trainer.sequence_parallel = {size}: {reason}"


def test_ranks_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(SetupError, match=r"trainer\.sequence_parallel is 2, but trainer\.ranks is 3"):
        ModelParallelGroup.of(RankGroup(size=3), 2)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
def test_each_token_belongs_to_one_rank(tokens: int) -> None:
    groups = [ModelParallelGroup(rank, 4) for rank in range(4)]
    rows = [range(tokens)[group.own(tokens)] for group in groups]
    assert [row for own in rows for row in own] == [*range(tokens)]
    whole = tokens + groups[0].missing(tokens)
    assert {len(range(whole)[group.own(whole)]) for group in groups} == {whole // 4}
