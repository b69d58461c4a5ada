"""`tinsmith models add` downloads a model that LoRA can train, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hub_of_models import Hub, hub_of_models
from tests.models import tiny_opt, tiny_qwen3

Add = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = '[[base_models]]\nname = "org/tiny"\npath = "org/tiny"'


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_of_models() as found:
        yield found


@pytest.fixture
def add(hub: Hub, tmp_path: Path) -> Add:
    """Runs the command with the hub's address, which its library reads when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "COLUMNS": "80"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "app.cli", "models", "add", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})

    return run


def test_a_model_is_downloaded_with_its_coverage_and_the_lines_for_the_config_file(add: Add, hub: Hub, tmp_path: Path):
    hub.repos["org/tiny"] = folder = tiny_qwen3(tmp_path / "tiny")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_text("of another program")
    (folder / "pytorch_model.bin").write_text("not read")
    done = add("org/tiny")
    assert (done.returncode, done.stderr) == (0, "")
    snapshot = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / ("1" * 40)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "Qwen3ForCausalLM, 0.1 million parameters, 512 tokens of context",
        "LoRA on attn, mlp, unembed",
        "to download: 0.0 GiB",
    ]
    assert [line for line in lines if len(line) > 80] == [f"  {snapshot}"], "a path stays whole"
    assert lines[-4:] == ["", *CONFIG.splitlines()]
    expected = {file.name for file in folder.iterdir()} - {"original", "pytorch_model.bin"}
    assert {file.name for file in snapshot.iterdir()} == expected
    sent = len(hub.sent)
    again = add("org/tiny", "--json")
    said = json.loads(again.stdout)
    assert (said["name"], said["config"], said["folder"]) == ("org/tiny", CONFIG, str(snapshot))
    assert (said["trainable_groups"], said["never_adapted"]) == (["attn", "mlp", "unembed"], {})
    assert said["weight_bytes"] == (folder / "model.safetensors").stat().st_size
    assert len(hub.sent) == sent, "files that are there are not sent again"


def test_a_model_that_lora_cannot_train_is_refused_before_its_weights_are_sent(add: Add, hub: Hub, tmp_path: Path):
    hub.repos["org/opt"] = tiny_opt(tmp_path / "opt")
    done = add("org/opt")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "base model 'org/opt' (OPTForCausalLM) cannot be trained with LoRA: it has modules that Tinsmith" in line
    assert set(hub.sent) == {"config.json"}
