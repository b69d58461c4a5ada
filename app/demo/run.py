"""Runs `tinsmith demo` from start to end, on a stack of its own: `tinsmith up` as a child process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from app import settings as settings_module
from app.demo import model
from app.domain.records import Worker
from app.stack import ports
from app.stack.child import end_with, environment
from app.stack.supervisor import SETUP_ERROR_CODE
from app.stores import objects
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, load

_PACKAGES = ("tinker", "matplotlib", "deepspeed", *model.PACKAGES)
_BUDGET_S = 300.0
_STOP_S = 60.0


def demo(data_dir: Path) -> None:
    """Runs the demo. Raises SetupError when a package is missing, SystemExit when the stack does not start."""
    model.check_packages(_PACKAGES)
    # The tokenizer is in the data folder; nothing is fetched.
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    os.environ.update(ports.without_proxy(os.environ))
    # On a busy machine, threads that spin while they wait make a step several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A failure raises an exception; the libraries' hints do not help the reader of a demo.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # A plain SIGTERM would skip the `finally` that stops the stack.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    _run(data_dir)


def _run(data_dir: Path) -> None:
    started = time.monotonic()
    _say("Starting a stack for the demo")
    with running_stack(data_dir) as stack:
        _say(f"Ready at {stack.url} after {time.monotonic() - started:.0f} s")
        # These take seconds. A stack that cannot start says so without them.
        import tinker

        from app.demo import report, training

        with tinker.ServiceClient(base_url=stack.url, api_key=stack.api_key) as service:
            client = service.create_lora_training_client(model.NAME, rank=training.RANK, seed=0).result()
            tokenizer = client.get_tokenizer()
            asked = time.monotonic()
            _say(f"Asking {model.NAME} three questions")
            base = service.create_sampling_client(base_model=model.NAME).result()
            before = training.answers(base, tokenizer)
            # Saving, loading and asking again take up to twice as long as asking takes now.
            reserve_s = 2 * (time.monotonic() - asked)
            _say("Fine-tuning it on the conversations")
            losses = training.fine_tune(client, tokenizer, started + _BUDGET_S - reserve_s)
            _say("Saving a checkpoint and the adapter")
            checkpoint = client.save_state("demo").result().path
            adapter = client.save_weights_for_sampler("demo").result().path
            _say("Asking the fine-tuned model the same questions")
            tuned = service.create_sampling_client(model_path=adapter).result()
            after = training.answers(tuned, tokenizer)
        report.print_answers(before, after)
        report.print_parts(stack.parts())
    result = report.Result(stack.url, before, after, losses, checkpoint, adapter, time.monotonic() - started)
    report.save_picture(losses, stack.data_dir / "loss.png")
    result.save(stack.data_dir / "demo.json")
    report.print_end(result, stack.data_dir)


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack: its URL, its API key, and its data folder."""

    url: str
    api_key: str
    data_dir: Path

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yields (part, description), as the live processes report them."""
        settings = settings_module.load(self.data_dir / "run" / "settings.toml", {})
        with connect(settings.redis.url) as client:
            for node, stored in RedisRecords(client).list(Worker.namespace):
                worker = load(Worker, stored)
                yield node, ", ".join(f"{key}={_brief(value)}" for key, value in worker.describe.items())
            yield "state", f"{_server(client)}, append-only"
        with connect(settings.broker_url) as client:
            yield "broker", f"Celery on {_server(client)}"
        yield "object store", f"{type(objects.create(settings)).__name__}, {self.data_dir / 'objects'}"


def _server(client: redis.Redis) -> str:
    server = client.info("server")
    version = server.get("valkey_version", server["redis_version"])
    return f"{server.get('server_name', 'redis')} {version}, port {server['tcp_port']}"


def _brief(value: object) -> str:
    """A value as text; of a long list or mapping (the adapters a sampler holds) only the length."""
    return str(len(value)) if isinstance(value, list | dict) and len(str(value)) > 20 else str(value)


@contextmanager
def running_stack(data_dir: Path) -> Iterator[Stack]:
    """Starts the stack, waits until it serves, and stops it at the end.

    Raises SystemExit with the stack's exit code when it does not start; the stack has printed the reason.
    """
    data_dir = data_dir.expanduser().absolute()
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "up", "--quiet", "--port", "0", "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE,
        text=True,
        # The servers and the key that a user's variables name are those of another stack.
        env=environment(os.environ),
        preexec_fn=lambda: end_with(parent),
    )
    try:
        yield Stack(_ready_url(process), (data_dir / "api-key").read_text().strip(), data_dir)
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        word, _, url = line.strip().partition(" ")
        if word == "ready":
            return url
    sys.exit(SETUP_ERROR_CODE if process.wait() == SETUP_ERROR_CODE else 1)
