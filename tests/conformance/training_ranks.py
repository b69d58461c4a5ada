"""Program of test_training_ranks.py: one scenario, in one process or as `python -m` in each rank of a group."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import CriticOutput, ForwardBackwardOutput, OptimStepOutput
from app.errors import UserOpError, WeightsOverflow
from app.settings import BaseModelSettings
from tests.parity.datums import batch, policy, supervised, valued
from workers.backends.training import backends, ranks
from workers.backends.training.base import GRADIENTS_FILE, Create, Load
from workers.backends.training.trainer import Trainer
from workers.models import peft_files
from workers.models.adapter import Adapter

BY_ONE = "written by one process"
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8, grad_clip_norm=5.0))
SFT = ForwardBackward(batch(supervised(1, (9, 30, 4, 22, 17))), "cross_entropy")
RL = ForwardBackward(batch(policy(2, (12, 25, 3))), "ppo")
# One micro-batch for two ranks, so the second rank has to keep step without work.
SHORT = ForwardBackward(batch(supervised(3, (6,))), "cross_entropy")
VALUED = ForwardBackward(batch(valued(4, (9, 30, 4, 22, 17))), "ppo_critic")
SHORT_VALUED = ForwardBackward(batch(valued(5, (6,))), "ppo_critic")


def run(backend: Trainer, folder: Path) -> dict[str, np.ndarray]:
    """Runs two adapters of different ranks and targets through every kind of Op. Returns the results by name."""
    found = criticize(backend)
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1)), "b": Create(LoraSpec(8, train_attn=False, train_mlp=False))})
    for turn, ops in enumerate(({"a": SFT, "b": RL}, {"b": SFT, "a": SHORT}, {"b": SHORT})):
        note(found, f"turn {turn}", backend.apply(ops))
        note(found, f"look {turn}", backend.apply({"a": replace(SHORT, forward_only=True)}))
        for model in ("a", "b"):
            found |= {f"grad {turn} {model} {name}": g for name, g in backend.gradients(model).items()}
        stepped = backend.apply({"a": STEP, "b": STEP} if turn < 2 else {"a": DropGradients()})
        for model, done in stepped.items():
            metrics = done.metrics if isinstance(done, OptimStepOutput) else {}
            found |= {f"step {turn} {model} {name}": np.array(value) for name, value in metrics.items()}
        backend.free_memory()  # as between the turns of a trainer that shares its GPUs with a sampler
    assert isinstance(backend.apply({"a": bad(), "b": SHORT})["a"], UserOpError)
    folder.mkdir()
    check_steps_together(backend, folder.parent)
    check_overflow(backend)
    backend.capture("a", optimizer=True)(folder)
    capture_and_go_on(backend, folder)
    # A fetched checkpoint is gone once the call returns.
    fetched = shutil.copytree(folder, folder.with_name("fetched"))
    backend.apply({"c": Create(LoraSpec(1), source=fetched, optimizer=True), "a": Load(fetched, optimizer=True)})
    shutil.rmtree(fetched)
    check_snapshot(backend, "b", folder.with_name("between gradients"), LoraSpec(8, train_attn=False, train_mlp=False))
    backend.close("b")
    return found | resume(backend, "a") | resume(backend, "c") | resume_by_one(backend, folder.with_name(BY_ONE))


def criticize(backend: Trainer) -> dict[str, np.ndarray]:
    """Runs two critics and a policy: the first Op of each, a step, and the values after it."""
    backend.apply({"v": Create(LoraSpec(4, seed=1), critic=True), "w": Create(LoraSpec(8), critic=True)})
    backend.apply({"p": Create(LoraSpec(4, seed=1))})
    found: dict[str, np.ndarray] = {}
    note(found, "first", backend.apply({"v": VALUED, "p": SFT, "w": SHORT_VALUED}))
    for model in ("v", "w"):
        found |= {f"first grad {model} {name}": g for name, g in backend.gradients(model).items()}
    backend.apply({"v": STEP, "w": STEP})
    note(found, "criticized", backend.apply({"v": replace(SHORT_VALUED, forward_only=True)}))
    for model in ("v", "w", "p"):
        backend.close(model)
    return found


def resume_by_one(backend: Trainer, folder: Path) -> dict[str, np.ndarray]:
    """Resumes a checkpoint that one process wrote, if there is one."""
    if not folder.exists():
        return {}
    backend.apply({"d": Create(LoraSpec(1), source=folder, optimizer=True)})
    backend.export("d")(folder.with_name("exported"))
    return resume(backend, "d")


def check_snapshot(backend: Trainer, model: str, folder: Path, lora: LoraSpec | None) -> None:
    """A model made from a snapshot with a pending gradient goes on to the same bits."""
    folder.mkdir()
    backend.capture(model, optimizer=True, gradients=True)(folder)
    assert (folder / GRADIENTS_FILE).exists()
    backend.apply({"restored": Create(lora, source=folder, optimizer=True, gradients=True)})
    ends = []
    for one in (model, "restored"):
        for op in (SHORT, STEP):
            backend.apply({one: op})
        end = folder.with_name(f"the end of {one}")
        end.mkdir()
        backend.capture(one, optimizer=True)(end)
        ends.append({path.name: path.read_bytes() for path in end.iterdir()})
    assert ends[0] == ends[1]
    backend.close("restored")


def check_steps_together(backend: Trainer, folder: Path) -> None:
    """Steps of two models together have the bits of steps alone, and no further sums over the ranks."""
    specs = {"one": LoraSpec(rank=4, seed=1), "two": LoraSpec(rank=8, seed=2)}
    names = [f"{name} {way}" for name in specs for way in ("alone", "beside")]
    for name in names:
        backend.apply({name: Create(specs[name.split()[0]])})
        backend.apply({name: SFT})
    clipped = OptimStep(replace(STEP.params, grad_clip_norm=1e-3))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        wanted = [*backend.apply({"one alone": STEP}).values()]
        of_one = sums.call_count
        wanted += backend.apply({"two alone": clipped}).values()
        of_both = sums.call_count
        found = backend.apply({"one beside": STEP, "two beside": clipped})
    assert sums.call_count - of_both == of_one
    assert [*found.values()] == wanted
    ends: dict[str, dict[str, bytes]] = {}
    for name in names:
        (folder / name).mkdir()
        backend.capture(name, optimizer=True)(folder / name)
        ends[name] = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        backend.close(name)
    assert ends["one alone"] == ends["one beside"] != ends["two alone"] == ends["two beside"]


def check_overflow(backend: Trainer) -> None:
    """A step that overflows fails on every rank; the model goes, and the one beside it stays."""
    for name in ("near", "far"):
        backend.apply({name: Create(LoraSpec(rank=4, seed=1))})
        backend.apply({name: SFT})
    found = backend.apply({"far": OptimStep(AdamParams(learning_rate=1e20)), "near": STEP})
    assert isinstance(found["far"], WeightsOverflow) and isinstance(found["near"], OptimStepOutput)
    backend.close("far")
    backend.apply({"far": Create(LoraSpec(rank=4, seed=1))})
    for name in ("near", "far"):
        assert isinstance(backend.apply({name: SFT})[name], ForwardBackwardOutput)
        backend.close(name)


def capture_and_go_on(backend: Trainer, saved: Path) -> None:
    """Captures "a", runs more Ops, and then writes: the files are those of the last save, bit for bit."""
    write = backend.capture("a", optimizer=True)
    for op in (SFT, STEP):
        backend.apply({"a": op})
    folder = saved.with_name("captured")
    folder.mkdir()
    write(folder)
    captured = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert captured == {path.name: path.read_bytes() for path in saved.iterdir()}


def resume(backend: Trainer, model: str) -> dict[str, np.ndarray]:
    """Runs the next step of a model; returns the results after it."""
    found: dict[str, np.ndarray] = {}
    backend.apply({model: SFT})
    backend.apply({model: STEP})
    note(found, f"resumed {model}", {"": backend.apply({model: replace(SFT, forward_only=True)})[model]})
    return found


def bad() -> ForwardBackward:
    datums = policy(2, (12, 25, 3))
    datums[1]["logprobs"][-1] = -1e4
    return ForwardBackward(batch(datums), "importance_sampling")


def note(found: dict[str, np.ndarray], name: str, results: Any) -> None:
    for model, output in results.items():
        assert isinstance(output, ForwardBackwardOutput | CriticOutput), output
        scores = output.values if isinstance(output, CriticOutput) else output.logprobs
        found[f"{name} {model} scores"] = scores.values
        found |= {f"{name} {model} {metric}": np.array(value) for metric, value in output.metrics.items()}


def read_late() -> None:
    """Delays this rank's checkpoint reads beyond the end of rank 0's."""
    read = peft_files.read

    def late(folder: Path) -> Adapter:
        time.sleep(0.5)
        return read(folder)

    peft_files.read = late


def end_alone(backend: Trainer, follower: int) -> None:
    """Trains and closes after the other rank is gone.

    Calls that need the other rank fail at once, and nothing waits for it.
    """
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1)), "b": Create(LoraSpec(rank=4, seed=1))})
    assert backend.healthy()
    os.kill(follower, signal.SIGKILL)
    try:
        backend.apply({"a": SFT})
    except RuntimeError:
        assert not backend.healthy()
    else:
        raise AssertionError("it trained alone")
    backend.close("a")
    backend.shutdown()
    os._exit(0)


def read_nothing() -> None:
    """Makes every checkpoint unreadable for this rank."""

    def unreadable(folder: Path) -> Adapter:
        raise UserOpError(f"{folder} cannot be read here")

    peft_files.read = unreadable


def end_apart(backend: Trainer, folder: Path, follower: int) -> None:
    """One rank has read a checkpoint and the other has not: the group is not healthy any more, and the other rank
    ends by itself."""
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1))})
    folder.mkdir()
    backend.capture("a", optimizer=True)(folder)
    try:
        backend.apply({"b": Create(LoraSpec(1), source=folder)})
    except RuntimeError as error:
        assert "1 of 2 ranks refused" in str(error), error
        assert not backend.healthy()
    else:
        raise AssertionError("it went on")
    for _ in range(600):
        if has_ended(follower):
            os._exit(0)
        time.sleep(0.1)
    raise AssertionError("the other rank goes on")


def has_ended(pid: int) -> bool:
    """True for a process that is gone, also for one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def main(settings: str, folder: str, end: str) -> None:
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    pid = Path(folder) / "follower"
    if os.environ["RANK"] != "0":
        pid.write_text(str(os.getpid()))
    backend.open()  # together
    if end == f"rank {os.environ['RANK']} reads nothing":
        read_nothing()
    if os.environ["RANK"] != "0":
        read_late()
        backend.follow()
        ranks.end()
    if end.endswith("reads nothing"):
        end_apart(backend, Path(folder) / "checkpoint", int(pid.read_text()))
    if end == "alone":
        end_alone(backend, int(pid.read_text()))
    found = run(backend, Path(folder) / "checkpoint")
    if end == "vanish":
        os._exit(0)
    (Path(folder) / "describe.json").write_text(json.dumps(backend.describe()))
    np.savez(Path(folder) / "found.npz", **found)
    backend.shutdown()
    ranks.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
