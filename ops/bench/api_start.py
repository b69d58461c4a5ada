"""Start-up time of the API, in a fresh process each time. Compiled bytecode is already present."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.settings import SETTINGS_VARIABLE
from ops.bench import servers, timing
from ops.bench.api_body import INFO
from ops.bench.report import Goal, Outcome
from ops.bench.timing import summary

_GOAL_MS = 1000.0
_ROUNDS = 10
_CREATE = """
import time
started = time.perf_counter()
from app import create_app
from app.settings import from_environment
create_app(from_environment())
print(1000 * (time.perf_counter() - started))
"""


def run(folder: Path, rounds: int = _ROUNDS) -> Outcome:
    with servers.prepared_api(folder, INFO) as api:
        sides = {"create_app": lambda: _create_app(api), "first_answer": lambda: timing.timed_ms(lambda: _serve(api))}
        timing.alternate(1, sides)
        found = timing.alternate(rounds, sides)
    figures = {
        "import_and_create_app_ms": summary(found["create_app"]),
        "gunicorn_until_first_answer_ms": summary(found["first_answer"]),
    }
    created = figures["import_and_create_app_ms"]["p50"]
    return Outcome(figures, (Goal("import and create_app: p50", created, "at_most", _GOAL_MS, "ms"),))


def _create_app(api: servers.Api) -> float:
    """Returns the ms of create_app in a fresh interpreter, without the interpreter's own start."""
    environ = {**os.environ, SETTINGS_VARIABLE: str(api.settings_file)}
    found = subprocess.run([sys.executable, "-c", _CREATE], env=environ, capture_output=True, text=True, check=True)
    return float(found.stdout)


def _serve(api: servers.Api) -> None:
    with servers.running_api(api):
        return
