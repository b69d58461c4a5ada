"""Flower shows each future as a task, with its name, model, state and runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker

from app.services.tenants.authentication import project_of
from tests.contract.data import ADAM, datum, sentences, supervised
from tests.contract.stack import API_KEY, BASE, Stack, running
from tests.contract.test_listening import listening
from tests.contract.test_secrets import CANARY, use
from tests.servers import free_port

# A login is Flower's own, and the same on every stack.
on_a_stack = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
LOGIN = "operator", "flower-canary"
PAGES = ("/", "/workers", "/tasks", "/broker", "/api/workers", "/api/tasks", "/api/task/types", "/api/queues/length")


@pytest.fixture(scope="module")
def flower(stack: Stack) -> Iterator[str]:
    with _running(stack, {"FLOWER_UNAUTHENTICATED_API": "1"}) as (url, _):
        # Flower answers HTTP before it listens to events, and misses earlier events: workers send a heartbeat every 2
        # s.
        await_answer(lambda: requests.get(f"{url}/workers?json=1", timeout=60).json()["data"])
        yield f"{url}/api/tasks"


@contextmanager
def _running(stack: Stack, environ: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Flower on the stack's data folder: (URL, process id). It starts beside a user's own `app.py`."""
    port, folder = free_port(), stack.data_dir.parent / "users"
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text("raise SystemExit('a file of the user was imported')\n")
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tinsmith"), "flower", f"--port={port}", f"--data-dir={stack.data_dir}"],
        env={**os.environ, **environ},
        cwd=folder,
    )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
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


def test_every_future_is_a_task_with_its_project_model_state_and_runtime(flower: str, training: tinker.TrainingClient):
    training.forward_backward(supervised(), "cross_entropy")
    training.optim_step(ADAM).result()
    bad = datum(sentences(1)[0], logprobs=[-1e30] * 12, advantages=[1.0] * 12)
    with pytest.raises(tinker.RequestFailedError):
        training.forward_backward([bad], "importance_sampling").result()

    def mine() -> list[dict[str, Any]]:
        tasks = requests.get(flower, timeout=60).json().values()
        found = [task for task in tasks if training.model_id in (task["kwargs"] or "")]
        # The API's events may arrive behind those of the trainer: each process sends its own every 0.2 s.
        finished = [task for task in found if task["sent"] and task["state"] in ("SUCCESS", "FAILURE")]
        return sorted(finished, key=lambda task: int(task["uuid"].rpartition(":")[2])) if len(finished) >= 4 else []

    tasks = await_answer(mine)
    assert [(task["name"], task["state"]) for task in tasks] == [
        ("tinsmith.create_model", "SUCCESS"),
        ("tinsmith.forward_backward", "SUCCESS"),
        ("tinsmith.optim_step", "SUCCESS"),
        ("tinsmith.forward_backward", "FAILURE"),
    ]
    assert all(task["runtime"] > 0 for task in tasks if task["state"] == "SUCCESS")
    shown = {"project": project_of(sha256(API_KEY.encode()).hexdigest()), "model_id": training.model_id}
    assert {task["kwargs"] for task in tasks} == {repr(shown)}
    assert {task["retries"] for task in tasks} == {0}
    assert all(task["sent"] <= task["received"] <= task["started"] for task in tasks)


@on_a_stack
def test_with_a_login_nothing_is_shown_without_it_and_it_listens_on_loopback_alone(stack: Stack):
    with _running(stack, {"FLOWER_BASIC_AUTH": ":".join(LOGIN)}) as (url, pid):
        await_answer(lambda: requests.get(f"{url}/healthcheck", timeout=60).ok)
        assert [place.partition(":")[0] for place in listening(pid)] == ["127.0.0.1"]
        asked = {path: requests.get(url + path, timeout=60).status_code for path in PAGES}
        assert {path: status for path, status in asked.items() if status != 401} == {}
        stop = requests.post(f"{url}/api/worker/shutdown/trainer-0", timeout=60)
        assert stop.status_code == 401
        assert requests.get(f"{url}/api/tasks", auth=("operator", "wrong"), timeout=60).status_code == 401
        assert requests.get(f"{url}/api/tasks", auth=LOGIN, timeout=60).status_code == 200


@on_a_stack
def test_its_api_takes_no_commands_where_no_login_is_set(stack: Stack):
    with _running(stack, {}) as (url, _):
        await_answer(lambda: requests.get(f"{url}/healthcheck", timeout=60).ok)
        for path in ("/api/tasks", "/api/workers"):
            assert requests.get(url + path, timeout=60).status_code == 401
        assert requests.post(f"{url}/api/worker/shutdown/trainer-0", timeout=60).status_code == 401


def test_it_shows_neither_payloads_nor_secrets(flower: str, stack: Stack, training: tinker.TrainingClient):
    use(training)
    url = flower.removesuffix("/api/tasks")

    def mine() -> list[str]:
        tasks = requests.get(flower, timeout=60).json()
        found = [id_ for id_, task in tasks.items() if training.model_id in (task["kwargs"] or "")]
        return found if len(found) >= 4 else []

    def both_workers() -> list[str]:
        """Flower waits only 1 s for a worker's answer."""
        found = list(requests.get(f"{url}/api/workers?refresh=1", timeout=60).json())
        return found if len(found) >= 2 else []

    pages = [*PAGES, *(f"/task/{id_}" for id_ in await_answer(mine)), "/api/workers?refresh=1"]
    pages += [f"/worker/{name}" for name in await_answer(both_workers)]
    shown = {path: requests.get(url + path, timeout=60).text for path in pages}
    assert training.model_id in shown["/api/tasks"]
    assert training.model_id not in requests.get(f"{url}/metrics", timeout=60).text, "this page asks for no login"
    settings = stack.settings()
    secrets = [API_KEY, settings.url_secret, settings.store.secret_key, *settings.api_keys]
    secrets += [sep.join(map(str, CANARY)) for sep in (", ", ",", " ")]
    assert [(path, secret) for path, text in shown.items() for secret in secrets if secret and secret in text] == []


def test_it_goes_on_when_the_stack_is_stopped_and_started_again(
    tmp_path_factory: pytest.TempPathFactory, base_path: Path
):
    folder = tmp_path_factory.mktemp("flower") / "data"
    sampler, program = 'backend = "transformers"', "tests.warm_workers"
    stack = Stack(folder, base_path, free_port(), 'backend = "torch"', sampler, program=program)
    with running(stack), _running(stack, {"FLOWER_UNAUTHENTICATED_API": "1"}) as (url, _):
        await_answer(lambda: requests.get(f"{url}/healthcheck", timeout=60).ok)  # it has found the stack
        stack.stop()
        stack.start()
        with stack.client() as client:
            await_answer(partial(_shows_a_new_one, f"{url}/api/tasks", client))


def _shows_a_new_one(tasks: str, client: tinker.ServiceClient) -> bool:
    """Makes a model; True if Flower shows it soon. Flower shows nothing from before it is connected again."""
    model = client.create_lora_training_client(base_model=BASE, rank=4).result().model_id
    time.sleep(1)
    return any(model in (task["kwargs"] or "") for task in requests.get(tasks, timeout=60).json().values())
