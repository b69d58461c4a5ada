"""Workers that an autoscaler starts for waiting calls and stops without them; no call is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tinker
import tomli_w
from tinker import types

from app.settings import SETTINGS_VARIABLE
from ops.helm import chart
from tests.contract.autoscaler import Autoscaler
from tests.contract.awaiting import await_true
from tests.contract.data import ADAM, logprobs, sentences, supervised, train
from tests.contract.stack import API_KEY, BASE
from tests.servers import free_port, start_valkey

PROMPT = types.ModelInput.from_ints(sentences(1)[0])
ONE_TOKEN = types.SamplingParams(max_tokens=1, temperature=0.0)
OWNS = "this worker owns the model now"
RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}


def rendered(base_path: Path) -> list[chart.Manifest]:
    """The chart with one base model, which KEDA scales: one trainer for each two models that wait."""
    base = {"name": BASE, "id": "tiny", "path": str(base_path), "settings": {"dtype": "float32"}}
    trainer, sampler = ({"settings": {"backend": name}, "resources": RESOURCES} for name in ("torch", "transformers"))
    base_models = [{**base, "trainer": {**trainer, "backlog": 2, "maxReplicas": 2}, "sampler": sampler}]
    return chart.render({"secret": "tinsmith", "keda": {"enabled": True}, "baseModels": base_models})


def here(text: str, folder: Path, port: int) -> dict[str, Any]:
    """The chart's settings with the addresses and folders of this machine."""
    settings = tomllib.loads(text)
    settings |= {"data_dir": str(folder / "data"), "url_secret": "s" * 32}
    settings["api"] |= {"host": "127.0.0.1", "port": port}
    settings["store"] = {"url": f"file://{folder}/objects"}
    return settings


@contextmanager
def api(url: str, environ: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application"]
    process = subprocess.Popen(command, env={**os.environ, **environ, "TINSMITH_API_KEY": API_KEY})
    try:
        await_true(lambda: process.poll() is not None or answers(url), "the API did not start")
        yield
    finally:
        process.terminate()
        process.wait(120)


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/api/v1/healthz", timeout=60).ok
    except requests.ConnectionError:
        return False


@pytest.fixture
def autoscaler(tmp_path: Path, base_path: Path) -> Iterator[Autoscaler]:
    manifests = rendered(base_path)
    port = free_port()
    by_kind = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
    config = tmp_path / "settings.toml"
    text = by_kind["ConfigMap", "tinsmith-settings"]["data"]["tinsmith.toml"]
    config.write_text(tomli_w.dumps(here(text, tmp_path, port)))
    with ExitStack() as stack:
        environ = {
            SETTINGS_VARIABLE: str(config),
            "TINSMITH_REDIS_URL": stack.enter_context(start_valkey(tmp_path / "state")),
            "TINSMITH_BROKER_URL": stack.enter_context(start_valkey(tmp_path / "broker", durable=False)),
            "OMP_NUM_THREADS": "1",
        }
        scaler = Autoscaler(f"http://127.0.0.1:{port}", environ, tmp_path, cool_down_s=5.0)
        for role in ("trainer", "sampler"):
            name = f"tinsmith-{role}-tiny"
            (container,) = chart.containers(by_kind["StatefulSet", name])
            scaler.add(role, container, by_kind["ScaledObject", name])
        yield scaler


@contextmanager
def scaling(scaler: Autoscaler) -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=scaler.run, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.timeout(1800)
def test_workers_are_scaled_to_zero_and_back_by_the_apis_metrics_and_no_call_is_lost(autoscaler: Autoscaler) -> None:
    scaler = autoscaler
    with scaling(scaler), ExitStack() as apis:
        apis.enter_context(api(scaler.url, scaler.environ))
        with tinker.ServiceClient(base_url=scaler.url, api_key=API_KEY) as service:
            assert scaler.starts.total() == 0, "nothing waits"
            trainings = [trained(service) for _ in range(3)]
            sampling = trainings[0].save_weights_and_get_sampling_client().result()
            sampled = sampling.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens
            await_true(lambda: not scaler.running, "workers go on, although nothing waits")
            before = scaler.starts.copy()
            assert before.keys() == scaler.workloads.keys()
            logs = [scaler.logs / f"trainer-{number}.log" for number in range(2)]
            logs[0].unlink()  # from here on, each log shows the models of its trainer
            apis.close()
            # This API process never saw a worker, and takes calls of a base model without workers.
            apis.enter_context(api(scaler.url, scaler.environ))
            calls = [(training, step(training)) for training in trainings]
            assert sampling.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == sampled
            found = [after(training, its) for training, its in calls]
            assert all(scaler.starts[name] > before[name] for name in before)
            assert scaler.most == {"trainer": 2, "sampler": 1}, "three models waited"
            more: list[Any] = []

            def both_train() -> bool:
                """Makes calls of three models, and a new model, which goes to the trainer with the fewest."""
                more.extend(call for training in trainings for call in step(training))
                trained(service)
                return all(OWNS in log.read_text() for log in logs)

            await_true(both_train, "one of two trainers has no model")
            undisturbed = trained(service)
            expected = after(undisturbed, step(undisturbed))
            for one in found:
                np.testing.assert_array_equal(one, expected)
            assert all(call.result() is not None for call in more)
            await_true(lambda: not scaler.running, "workers go on, although nothing waits")
    assert set(scaler.codes) == {0}, "each worker ended in order"
    assert len(scaler.codes) >= 4, "a trainer and a sampler served twice"


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(training, 1)
    return training


def step(training: tinker.TrainingClient) -> list[Any]:
    return [training.forward_backward(supervised(seed=7), "cross_entropy"), training.optim_step(ADAM)]


def after(training: tinker.TrainingClient, calls: list[Any]) -> np.ndarray:
    """The model's logprobs after these calls, each of which has a result."""
    assert all(call.result() is not None for call in calls)
    return logprobs(training.forward(supervised(seed=8), "cross_entropy").result())
