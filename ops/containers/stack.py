"""docker-compose.yml as a separate Compose project, on a tiny random model, with generated secrets."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from ops.containers import engine as engines
from ops.containers.engine import Engine, Task
from ops.containers.shell import FOLDER, ROOT
from tests.models import tiny_qwen3

# Not "tinsmith": its volumes are removed at the end, and a stack in use must keep its own.
PROJECT = "tinsmith-trial"
MAIN_FILE = ROOT / "docker-compose.yml"
SECOND_TRAINER = ROOT / "ops" / "compose.second-trainer.yml"
_ENV_FILE = FOLDER / "env"
_MODEL = FOLDER / "model"
# The building engine has no network for containers, except the machine's own.
_BUILD_FILE = Path(__file__).with_name("build.yml")


def compose(engine: Engine, *arguments: str, files: tuple[Path, ...] = ()) -> None:
    """Runs `docker compose ARGUMENTS` with docker-compose.yml and `files` on top. Raises CalledProcessError."""
    _prepare()
    engine.show(*_options(engine, files), *arguments)


def services(engine: Engine) -> dict[str, dict[str, Any]]:
    """Services of docker-compose.yml, with every variable replaced."""
    _prepare()
    found = json.loads(engine.docker(*_options(engine, ()), "config", "--format", "json"))
    named: dict[str, dict[str, Any]] = found["services"]
    return named


def up(files: tuple[Path, ...] = ()) -> Engine:
    """Starts the services and returns when every one is healthy."""
    engine = engines.get(Task.RUN)
    compose(engine, "up", "--detach", "--no-build", "--wait", "--wait-timeout", "600", files=files)
    return engine


def down() -> None:
    """Removes containers and volumes, and stops a private engine."""
    engine = engines.running()
    if engine:
        compose(engine, "down", "--volumes", "--remove-orphans", files=(SECOND_TRAINER,))
    engines.stop()


def secret(name: str) -> str:
    """Reads a value of the environment file."""
    return dict(line.split("=", 1) for line in _ENV_FILE.read_text().splitlines())[name]


def _options(engine: Engine, files: tuple[Path, ...]) -> list[str]:
    if engine.task is Task.BUILD:
        files = (*files, _BUILD_FILE)
    named = [f"--file={file}" for file in (MAIN_FILE, *files)]
    return ["compose", f"--project-name={PROJECT}", f"--env-file={_ENV_FILE}", *named]


def _prepare() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not _MODEL.exists():
        tiny_qwen3(_MODEL)
        # safetensors writes files that only their owner can read, and the workers run as another user.
        for file in _MODEL.iterdir():
            file.chmod(0o644)
    if not _ENV_FILE.exists():
        values = {
            "REDIS_PASSWORD": secrets.token_hex(24),
            "MINIO_ROOT_USER": "trial",
            "MINIO_ROOT_PASSWORD": secrets.token_hex(16),
            "URL_SECRET": secrets.token_hex(16),
            "TINSMITH_API_KEY": f"tml-{secrets.token_hex(24)}",
            "FLOWER_BASIC_AUTH": f"trial:{secrets.token_hex(16)}",
            "TINSMITH_MODEL_DIR": str(_MODEL),
        }
        _ENV_FILE.touch(mode=0o600)
        _ENV_FILE.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
