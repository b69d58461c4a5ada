"""Runs pytest again and again, each time in a fork of a process that has imported the slow packages, such as torch.

Nothing of the project is imported before the fork, so every run reads its files in their current state. This file is
started by its path, and each line on its stdin is one run.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

# Imports of the tests that mutants name, as far as they take more than 50 ms.
_HEAVY = (
    *("celery.app.amqp", "celery.app.task", "compressed_tensors", "deepspeed", "flask_smorest"),
    *("google.protobuf.message", "hypothesis.stateful", "jinja2", "minio", "numpy", "peft", "prometheus_client"),
    *("psutil", "pydantic", "pytest", "redis", "safetensors.torch", "tinker", "tokenizers"),
    *("torch.distributed.tensor", "torch.nn.attention.varlen"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
)
# Only the plugins that tests here need: schemathesis alone takes two seconds, in every run.
_ENVIRON = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_PLUGINS = ["-p", "pytest_timeout"]
_ENDED_OTHERWISE = 99
# A run that hangs has failed: one that takes longer, for each test. pytest-timeout stops its clock when a test has
# failed, before the fixtures end.
_LIMIT_S, _TESTS_FAILED = 300.0, 1


class Warm:
    """The process, from its user's side."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRON},
        )

    def run(self, folder: Path, arguments: list[str]) -> tuple[int, str]:
        """pytest's exit code and output, as of `python -m pytest ARGUMENTS` in the folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), str(self._log), arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()), self._log.read_text(errors="replace")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def warm(log: Path) -> Iterator[Warm]:
    process = Warm(log)
    try:
        yield process
    finally:
        process.end()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints when it is imported
    for module in _HEAVY:
        import_module(module)
    gc.freeze()  # the garbage collector of a fork must not scan all that, and copy its pages
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(*json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=answers, flush=True)


def _run(folder: str, log: str, arguments: list[str]) -> NoReturn:
    code = _ENDED_OTHERWISE
    try:
        with Path(log).open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        sys.path[0] = folder
        random.seed()
        limit = threading.Timer(_LIMIT_S * len(arguments), os._exit, [_TESTS_FAILED])
        limit.daemon = True
        limit.start()
        code = int(import_module("pytest").main([*_PLUGINS, *arguments]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
