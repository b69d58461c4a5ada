"""`tinsmith status` shows the workers and the runs of a stack that serves."""

from __future__ import annotations

import json
import subprocess
import sys

import tinker

from tests.contract.data import train
from tests.contract.stack import BASE, Stack


def test_it_shows_every_worker_and_who_holds_a_run(stack: Stack, training: tinker.TrainingClient):
    train(training, 2)
    command = [sys.executable, "-m", "app.cli", "status", "--json", f"--data-dir={stack.data_dir}"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert {(one["role"], one["base_model"], one["healthy"]) for one in found["workers"]} >= {
        ("trainer", BASE, True),
        ("sampler", BASE, True),
    }
    [run] = [one for one in found["runs"] if one["id"] == training.model_id]
    assert run["calls"] == 5, "its creation, and two steps of two calls each"
    assert run["worker"].startswith("trainer-") and run["waiting"] == 0
    holders = {one["name"]: one["models"] for one in found["workers"]}
    assert holders[run["worker"]] >= 1
