"""Two DeepSpeed ranks (gloo) compute what one process of plain torch computes, at ZeRO stages that partition state."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.domain.ops import LoraSpec
from app.settings import BaseModelSettings, Settings
from tests.conformance import training_ranks
from tests.conformance.groups import run_group
from tests.hosts import FIRST, SECOND, install_ssh
from tests.models import tiny_qwen3
from tests.parity import architectures
from tests.parity.reference import relative_error
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer
from workers.process.multinode import run


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, or the case of tests/parity/architectures.py that a test names."""
    folder = tmp_path_factory.mktemp("base")
    return architectures.build(request.param, folder) if hasattr(request, "param") else tiny_qwen3(folder)


@pytest.fixture(scope="module")
def alone(base: Path) -> Trainer:
    torch.set_num_threads(1)
    backend = backends.create(settings(base, backend="torch"))
    backend.open()
    return backend


@pytest.fixture(scope="module")
def wanted(alone: Trainer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return training_ranks.run(alone, tmp_path_factory.mktemp("alone") / "checkpoint")


def settings(base: Path, **trainer: Any) -> BaseModelSettings:
    trainer = {"micro_batch_tokens": 64, **trainer}
    return BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer)


def run_ranks(base: Path, folder: Path, stage: int, end: str, *, offload: bool = False) -> list[int | None]:
    """Runs both ranks and returns their exit codes."""
    trainer = {"backend": "deepspeed", "zero_stage": stage, "ranks": 2, "offload": offload, "device_models": 2}
    text = settings(base, **trainer).model_dump_json()
    return run_group(training_ranks.main, text, str(folder), end)


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_two_ranks_equal_one_process(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path, stage: int, offload: bool
) -> None:
    check_two_ranks(base, alone, wanted, tmp_path, stage, offload=offload)


@pytest.mark.parametrize("base", ["qwen3-moe"], indirect=True)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_equal_one_process_on_a_model_with_experts(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path, stage: int
) -> None:
    check_two_ranks(base, alone, wanted, tmp_path, stage)


@pytest.mark.parametrize("base", ["qwen3.5"], indirect=True)
def test_two_ranks_equal_one_process_on_a_model_with_a_recurrent_state(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Their datums differ in number and length, so their recurrent layers differ in calls."""
    check_two_ranks(base, alone, wanted, tmp_path, stage=3)


def check_two_ranks(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path, stage: int, *, offload: bool = False
) -> None:
    written_by_one(alone, tmp_path / training_ranks.BY_ONE)
    assert run_ranks(base, tmp_path, stage, "stay", offload=offload) == [0, 0]
    with np.load(tmp_path / "found.npz") as stored:
        found = dict(stored)
    check_exported(alone, tmp_path / training_ranks.BY_ONE, tmp_path / "exported")
    check_resumed(alone, tmp_path / training_ranks.BY_ONE, "d", found)
    found = {name: value for name, value in found.items() if not name.startswith("resumed d")}
    assert found.keys() == wanted.keys()
    first = {name: value for name, value in wanted.items() if name.startswith(("first", "turn 0", "look 0", "grad 0"))}
    assert relative_error({name: found[name] for name in first}, first) < 1e-5
    # Adam divides a gradient by its own size, so rounding in tiny gradients grows with every step.
    assert relative_error(found, wanted) < 1e-3
    describe = json.loads((tmp_path / "describe.json").read_text())
    assert (describe["trainer"], describe["zero_stage"], describe["ranks"]) == ("DeepSpeedEngine", stage, 2)
    assert (describe["base_elements_held"] == 0) == (stage == 3)
    check_resumed(alone, tmp_path / "checkpoint", "a", found)


def test_two_hosts_equal_one_process(
    base: Path, wanted: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_ssh(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = settings(base, backend="deepspeed", zero_stage=2, ranks=2).model_dump_json()
    command = ["tests.conformance.training_ranks", text, str(tmp_path), "stay"]
    assert run({FIRST: 1, SECOND: 1}, Settings(data_dir=tmp_path), "two", command) == 0
    with np.load(tmp_path / "found.npz") as stored:
        found = dict(stored)
    first = {name: value for name, value in wanted.items() if name.startswith(("turn 0", "look 0", "grad 0"))}
    assert relative_error({name: found[name] for name in first}, first) < 1e-5
    assert relative_error(found, wanted) < 1e-3
    assert json.loads((tmp_path / "describe.json").read_text())["ranks"] == 2


def written_by_one(alone: Trainer, folder: Path) -> None:
    """Writes a checkpoint with an optimizer state in one process, for two ranks to resume."""
    alone.apply({"d": Create(LoraSpec(rank=4, seed=9))})
    for op in (training_ranks.SFT, training_ranks.STEP):
        alone.apply({"d": op})
    folder.mkdir()
    alone.capture("d", optimizer=True)(folder)


def check_exported(alone: Trainer, folder: Path, exported: Path) -> None:
    """The merged model of two ranks is that of one process, bit for bit."""
    alone.apply({"e": Create(LoraSpec(1), source=folder)})
    alone.export("e")(folder.with_name("exported by one"))
    wanted = {path.name: path.read_bytes() for path in folder.with_name("exported by one").iterdir()}
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == wanted


def check_resumed(alone: Trainer, folder: Path, model: str, found: dict[str, np.ndarray]) -> None:
    """One process and two ranks resume a checkpoint with the same results.

    This holds for checkpoints and optimizer states written by either of them.
    """
    alone.apply({model: Create(LoraSpec(1), source=folder, optimizer=True)})
    resumed = training_ranks.resume(alone, model)
    assert relative_error({name: found[name] for name in resumed}, resumed) < 1e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_rank_0_fails_at_once_and_closes_without_waiting_when_a_rank_is_gone(
    base: Path, tmp_path: Path, stage: int
) -> None:
    leader, follower = run_ranks(base, tmp_path, stage, "alone")
    assert (leader, follower) == (0, -signal.SIGKILL)


def test_a_rank_ends_when_rank_0_is_gone(base: Path, tmp_path: Path) -> None:
    leader, follower = run_ranks(base, tmp_path, 2, "vanish")
    assert leader == 0
    assert follower not in (0, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_could_not_read_a_checkpoint_do_not_go_on(base: Path, tmp_path: Path, rank: int) -> None:
    leader, follower = run_ranks(base, tmp_path, 2, f"rank {rank} reads nothing")
    assert leader == 0
    assert follower not in (0, None)
