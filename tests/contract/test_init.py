"""A stack starts from what `tinsmith models add` and `tinsmith init` leave, without the hub, and trains."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.data import train
from tests.contract.stack import Stack, running
from tests.hub_of_models import hub_of_models
from tests.servers import free_port

ID = "org/tiny"


def tinsmith(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "app.cli", *arguments], check=True, capture_output=True)


@dataclass
class Initialised(Stack):
    def _toml(self) -> str:
        file = self.data_dir.parent / "written.toml"
        tinsmith("init", str(file), "--model", ID)
        return file.read_text()


def test_a_downloaded_model_is_trained(base_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with hub_of_models() as hub:
        hub.repos[ID] = base_path
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        tinsmith("models", "add", ID)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stack = Initialised(tmp_path / "data", base_path, free_port(), program="tests.warm_workers")
    with running(stack), stack.client() as client:
        training = client.create_lora_training_client(base_model=ID, rank=4, seed=1).result()
        train(training, 1)
    assert stack.settings().base_models[0].path == ID
