"""Processes stop and start again; runs, checkpoints and keys stay."""

from __future__ import annotations

import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from app.domain.records import Sampler, ShmTransfer, Worker
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, dump, load
from tests.contract.data import logprobs, sentences, supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.servers import free_port

PROMPT = types.ModelInput.from_ints(sentences(1)[0])


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    """Two plain-torch trainers and the light sampler: processes die here, not kernels."""
    folder = tmp_path_factory.mktemp("light") / "data"
    trainer = 'backend = "torch"\ncount = 2'
    stack = Stack(
        folder,
        base_path,
        free_port(),
        trainer,
        'backend = "transformers"',
        "[engine]\nlease_s = 3.0\nring_again_s = 2.0",
        "tests.warm_workers",
    )
    with running(stack):
        yield stack


@pytest.fixture
def service(light: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    """A client without telemetry, which reports the outages here. Python 3.11's `wait_for` can lose the cancellation of
    its task, and then `close` waits for ever."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with light.client() as client:
        yield client


def undisturbed(service: tinker.ServiceClient, steps: int) -> np.ndarray:
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, steps)
    return logprobs(client.forward(supervised(seed=8), "cross_entropy").result())


def children(stack: Stack, words: str) -> list[psutil.Process]:
    """Returns the processes of found_children; there must be at least one."""
    found = found_children(stack, words)
    assert found, f"no process of {words!r}"
    return found


def found_children(stack: Stack, words: str) -> list[psutil.Process]:
    """Finds children by their node names.

    Celery may replace the command line with a title, and both contain the name.
    """
    assert stack.process is not None
    running = psutil.Process(stack.process.pid).children(recursive=True)
    return [child for child in running if words in _command_line(child)]


def _command_line(process: psutil.Process) -> str:
    """Command line; empty if the process has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def is_gone(process: psutil.Process) -> bool:
    """Tells if the process has ended, even if its parent has not waited for it."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def await_true(what: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def metrics_urls(stack: Stack) -> dict[str, str]:
    """The URL of each worker's metrics, by its name."""
    with stack.redis() as client:
        workers = [(node, load(Worker, fields)) for node, fields in RedisRecords(client).list(Worker.namespace)]
    return {node.partition("@")[0]: worker.metrics_url for node, worker in workers}


def has_metrics(url: str) -> bool:
    """False while the worker starts: its record may be the one that it had before."""
    with suppress(OSError):
        return b"tinsmith_ops_total" in urllib.request.urlopen(url, timeout=60).read()
    return False


def printed_urls(stack: Stack) -> list[dict[str, str]]:
    """The URLs that `tinsmith up` prints at each start."""
    lines = [line.split() for line in stack.output if line.startswith("metrics of ")]
    named = [(name.removesuffix(":"), url) for _, _, name, url in lines]
    return [dict(named[start : start + 3]) for start in range(0, len(named), 3)]


def test_a_killed_trainer_changes_no_result(service: tinker.ServiceClient, light: Stack):
    urls = metrics_urls(light)
    assert printed_urls(light) == [urls] and len(set(urls.values())) == 3
    expected = undisturbed(service, 6)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 3)
    for trainer in children(light, "trainer-"):
        trainer.send_signal(signal.SIGKILL)
    train(client, 3)
    found = logprobs(client.forward(supervised(seed=8), "cross_entropy").result())
    assert np.array_equal(found, expected)
    await_true(lambda: metrics_urls(light) == urls and all(map(has_metrics, urls.values())))


def test_a_killed_sampler_loses_no_request(service: tinker.ServiceClient, light: Stack):
    client = service.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=200, temperature=1.0, seed=3, stop=[])
    before = client.sample(PROMPT, 2, params).result()
    pending = [client.sample(PROMPT, 2, params) for _ in range(4)]
    for sampler in children(light, "sampler-"):
        sampler.send_signal(signal.SIGKILL)
    for future in pending:
        assert [s.tokens for s in future.result().sequences] == [s.tokens for s in before.sequences]


def test_lost_messages_are_dispatched_again(service: tinker.ServiceClient, light: Stack):
    client = service.create_lora_training_client(base_model=BASE, rank=4).result()
    trainers = children(light, "trainer-")
    for trainer in trainers:
        trainer.suspend()
    pending = [client.forward_backward(supervised(), "cross_entropy") for _ in range(3)]
    with light.redis() as state, connect(light.settings().broker_url) as broker:
        await_true(lambda: state.zcard(keys.journal(client.model_id)) >= 4)
        broker.flushdb()
    for trainer in trainers:
        trainer.resume()
    assert all(future.result() for future in pending)


def test_a_stack_started_again_on_its_folder_goes_on_where_it_was(light: Stack, service: tinker.ServiceClient):
    expected = undisturbed(service, 6)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 3)
    path = client.save_state("kept").result().path
    everything, urls = children(light, ""), metrics_urls(light)
    assert light.stop() == 0
    assert [process for process in everything if not is_gone(process)] == []
    light.start()
    await_true(lambda: metrics_urls(light) == urls)
    assert printed_urls(light)[-1] == urls
    train(client, 3)
    found = logprobs(client.forward(supervised(seed=8), "cross_entropy").result())
    assert np.array_equal(found, expected)
    assert service.create_training_client_from_state(path).result().get_info().lora_rank == 4


def test_weights_that_were_never_uploaded_are_made_again_when_a_sampler_misses_them(
    service: tinker.ServiceClient, light: Stack
):
    """Simulates a kill of all processes between commit and upload, and a restart of the machine."""
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=7).result()
    train(client, 2)
    sampling = client.save_weights_and_get_sampling_client().result()
    scored = sampling.compute_logprobs(PROMPT).result()
    with light.redis() as redis:
        records, model_id = RedisRecords(redis), client.model_id
        await_true(lambda: not list(records.list(ShmTransfer.namespace)))
        samplers = [load(Sampler, fields) for _, fields in records.list(Sampler.namespace)]
        (prefix,) = [one.prefix for one in samplers if f"/{model_id}/" in one.prefix]
        for process in (*children(light, "trainer-"), *children(light, "sampler-")):
            process.kill()
        records.put(ShmTransfer.namespace, prefix, dump(ShmTransfer(model_id, 5)))
        shutil.rmtree(light.data_dir / "objects" / prefix)
        shutil.rmtree(light.settings().handover_dir, ignore_errors=True)
        assert sampling.compute_logprobs(PROMPT).result() == scored
        await_true(lambda: not list(records.list(ShmTransfer.namespace)))  # noted after the upload
