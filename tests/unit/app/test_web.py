"""Start of the API process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from app import create_app
from app.errors import SetupError
from app.settings import SETTINGS_VARIABLE, Settings

PROBE = """
import app.wsgi, json, sys
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.fixture
def config(tmp_path: Path, state_url: str) -> Path:
    path = tmp_path / "tinsmith.toml"
    path.write_text(
        f'data_dir = "{tmp_path}"\n[redis]\nurl = "{state_url}"\n[api]\npoll_capacity = 100\nspare_threads = 20\n'
    )
    return path


def test_the_api_process_loads_no_gpu_library_and_no_worker(config: Path) -> None:
    environment = {**os.environ, SETTINGS_VARIABLE: str(config)}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "flask" in loaded
    assert not loaded & {"torch", "vllm", "deepspeed", "transformers", "peft", "workers"}


def test_the_domain_alone_loads_no_web_framework() -> None:
    probe = "import app.domain.ops, app.wire.results, sys; print('flask' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_gunicorn_has_threads_for_every_poll_and_more_and_connections_above_them(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    settings = runpy.run_module("app.gunicorn_conf")
    assert (settings["workers"], settings["worker_class"], settings["threads"]) == (1, "gthread", 120)
    assert settings["worker_connections"] > settings["threads"]


def test_settings_without_a_state_server_are_refused_with_the_remedy() -> None:
    with pytest.raises(SetupError, match=r"redis\.url"):
        create_app(Settings())
