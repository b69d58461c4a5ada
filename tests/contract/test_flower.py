"""Flower shows each future as a task, with its name, model, state and runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import tinker

from app.settings import SETTINGS_VARIABLE
from tests.contract.data import ADAM, datum, sentences, supervised
from tests.contract.stack import Stack
from tests.servers import free_port


@pytest.fixture(scope="module")
def flower(stack: Stack) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", "workers.celery_app", "flower", f"--port={port}"]
    process = subprocess.Popen(
        [*command, "--address=127.0.0.1"],
        env={
            **os.environ,
            SETTINGS_VARIABLE: str(stack.data_dir / "run" / "settings.toml"),
            "FLOWER_UNAUTHENTICATED_API": "1",
        },
    )
    try:
        # Flower answers HTTP before it listens to events, and misses earlier events: workers send a heartbeat every 2
        # s.
        url = f"http://127.0.0.1:{port}"
        await_answer(lambda: requests.get(f"{url}/workers?json=1", timeout=60).json()["data"])
        yield f"{url}/api/tasks"
    finally:
        process.terminate()
        process.wait(120)


def await_answer(check: Any, seconds: float = 240) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if answer := check():
                return answer
        except (requests.ConnectionError, requests.Timeout):
            pass
        time.sleep(0.1)
    raise TimeoutError("Flower did not show it")


def test_every_future_is_a_task_with_its_name_model_state_and_runtime(flower: str, training: tinker.TrainingClient):
    training.forward_backward(supervised(), "cross_entropy")
    training.optim_step(ADAM).result()
    bad = datum(sentences(1)[0], logprobs=[-1e30] * 12, advantages=[1.0] * 12)
    with pytest.raises(tinker.RequestFailedError):
        training.forward_backward([bad], "importance_sampling").result()

    def mine() -> list[dict[str, Any]]:
        tasks = requests.get(flower, timeout=60).json().values()
        found = [task for task in tasks if training.model_id in (task["kwargs"] or "")]
        finished = [task for task in found if task["state"] in ("SUCCESS", "FAILURE")]
        return sorted(finished, key=lambda task: int(task["uuid"].rpartition(":")[2])) if len(finished) >= 4 else []

    tasks = await_answer(mine)
    assert [(task["name"], task["state"]) for task in tasks] == [
        ("tinsmith.create_model", "SUCCESS"),
        ("tinsmith.forward_backward", "SUCCESS"),
        ("tinsmith.optim_step", "SUCCESS"),
        ("tinsmith.forward_backward", "FAILURE"),
    ]
    assert all(task["runtime"] > 0 for task in tasks if task["state"] == "SUCCESS")
    assert all("payload" not in (task["kwargs"] or "") for task in tasks)
