"""`tinsmith status` and `tinsmith logs` show the workers, the runs and the calls of a stack that serves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import tinker

from app.stack.run_news import short
from tests.contract.awaiting import await_true
from tests.contract.data import train
from tests.contract.stack import BASE, Stack


def asked(stack: Stack, *command: str) -> dict[str, Any]:
    run = [sys.executable, "-m", "app.cli", *command, "--json", f"--data-dir={stack.data_dir}"]
    return json.loads(subprocess.run(run, stdout=subprocess.PIPE, check=True, timeout=120).stdout)


def test_it_shows_every_worker_and_who_holds_a_run(stack: Stack, training: tinker.TrainingClient):
    train(training, 2)
    found = asked(stack, "status")
    assert {(one["role"], one["base_model"], one["healthy"]) for one in found["workers"]} >= {
        ("trainer", BASE, True),
        ("sampler", BASE, True),
    }
    [run] = [one for one in found["runs"] if one["id"] == training.model_id]
    assert run["calls"] == 5, "its creation, and two steps of two calls each"
    assert (run["steps"], run["trained_tokens"] > 0, run["loss"] > 0, run["tokens_per_s"] > 0) == (2, True, True, True)
    assert run["worker"].startswith("trainer-") and run["waiting"] == 0
    holders = {one["name"]: one["models"] for one in found["workers"]}
    assert holders[run["worker"]] >= 1


def test_the_logs_of_a_call_are_those_of_the_api_and_of_the_trainer_that_ran_it(
    stack: Stack, training: tinker.TrainingClient
):
    train(training, 1)
    found = asked(stack, "logs", f"{training.model_id}:1")
    assert (found["kind"], found["state"], found["base_model"]) == ("forward_backward", "done", BASE)
    assert {line["process"].partition("-")[0] for line in found["lines"]} == {"api", "trainer"}
    assert found["stages"].keys() == {"waited_s", "run_s", "commit_s"}


def test_the_stack_tells_of_a_run_from_its_start_to_its_end(stack: Stack, training: tinker.TrainingClient):
    run = f"run {short(training.model_id)}"

    def is_told(end: str) -> bool:
        return any(line.startswith(run) and end in line for line in list(stack.output))

    await_true(lambda: is_told(f"starts: LoRA 8 of {BASE}"), "the run has begun")
    train(training, 2)
    await_true(lambda: is_told(": step 2, loss "), "the run has gone on")
    assert [line for line in stack.output if len(line) > 81 and line.startswith(run)] == []
    asked(stack, "cancel", training.model_id.partition(":")[0], "--yes")
    await_true(lambda: is_told("has ended after 2 steps: it"), "the run has ended")
