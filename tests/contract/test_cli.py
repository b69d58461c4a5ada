"""The `tinker` command against the stack: the output and the effect of each command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from safetensors.numpy import load_file
from tinker.cli.__main__ import main_cli

from tests.contract.data import train
from tests.contract.stack import API_KEY, BASE, Stack
from tests.hub_stand_in import TOKEN, hub

pytestmark = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
Cli = Callable[..., Any]


@pytest.fixture
def cli(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command; returns its output as JSON, or as text with `text`."""
    monkeypatch.setenv("TINKER_BASE_URL", stack.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)

    def run(*arguments: str, text: bool = False) -> Any:
        asked = arguments if text else ("--format", "json", *arguments)
        result = CliRunner().invoke(main_cli, asked)
        if result.exception is not None:
            raise result.exception
        return result.stdout if text else json.loads(result.stdout)

    return run


@pytest.fixture(scope="module")
def saved(stack: Stack) -> dict[str, str]:
    """Paths of a run's checkpoints, by kind."""
    with stack.client() as client:
        training = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        train(training, 1)
        return {
            "training": training.save_state("kept").result().path,
            "sampler": training.save_weights_for_sampler("kept").result().path,
            "external": training.save_weights_external("kept").result().path,
        }


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def one(cli: Cli, path: str) -> dict[str, Any]:
    """One checkpoint, as the list of its run shows it."""
    listed = cli("checkpoint", "list", "--run-id", run_of(path))["checkpoints"]
    return next(found for found in listed if found["tinker_path"] == path)


def test_runs_are_listed_and_described(cli: Cli, saved: dict[str, str]):
    run = run_of(saved["training"])
    listed = cli("run", "list", "--limit", "0")["runs"]
    assert run in [found["training_run_id"] for found in listed]
    described = cli("run", "info", run)
    assert (described["base_model"], described["lora_rank"], described["corrupted"]) == (BASE, 8, False)
    assert described["last_checkpoint"]["tinker_path"] == saved["training"]
    assert run in cli("run", "list", "--columns", "id,model,owner,lora,updated,status,checkpoint", text=True)
    assert len(cli("run", "list", "--limit", "1")["runs"]) == 1


def test_checkpoints_are_listed_of_one_run_and_of_all_and_described(cli: Cli, saved: dict[str, str]):
    of_the_run = cli("checkpoint", "list", "--run-id", run_of(saved["training"]))["checkpoints"]
    assert {found["tinker_path"] for found in of_the_run} == set(saved.values())
    everything = cli("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert set(saved.values()) <= {found["tinker_path"] for found in everything}
    for kind, path in saved.items():
        described = cli("checkpoint", "info", path)
        assert (described["tinker_path"], described["checkpoint_type"]) == (path, kind)


def test_a_checkpoint_is_published_and_is_not_any_more(cli: Cli, saved: dict[str, str]):
    cli("checkpoint", "publish", saved["training"], text=True)
    assert one(cli, saved["training"])["public"] is True
    cli("checkpoint", "unpublish", saved["training"], text=True)
    assert one(cli, saved["training"])["public"] is False


def test_a_checkpoint_gets_an_end_and_loses_it(cli: Cli, saved: dict[str, str]):
    cli("checkpoint", "set-ttl", saved["sampler"], "--ttl", "7200", text=True)
    assert one(cli, saved["sampler"])["expires_at"] is not None
    cli("checkpoint", "set-ttl", saved["sampler"], "--remove", text=True)
    assert one(cli, saved["sampler"])["expires_at"] is None


def test_checkpoints_are_deleted(cli: Cli, training: tinker.TrainingClient):
    paths = [training.save_state(name).result().path for name in ("a", "b", "c")]
    cli("checkpoint", "delete", "--yes", *paths[:2], text=True)
    left = cli("checkpoint", "list", "--run-id", run_of(paths[0]))["checkpoints"]
    assert [found["tinker_path"] for found in left] == paths[2:]
    cli("checkpoint", "delete", "--yes", "--run-id", run_of(paths[0]), text=True)
    assert cli("checkpoint", "list", "--run-id", run_of(paths[0]))["checkpoints"] == []


@pytest.mark.parametrize("kind", ["external", "training"])
def test_a_checkpoint_is_downloaded_and_nothing_stays_behind(
    cli: Cli, saved: dict[str, str], kind: str, tmp_path: Path
):
    before = len(cli("checkpoint", "list", "--limit", "0")["checkpoints"])
    cli("checkpoint", "download", saved[kind], "--output", str(tmp_path))
    [folder] = tmp_path.iterdir()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert load_file(folder / "adapter_model.safetensors")
    assert len(cli("checkpoint", "list", "--limit", "0")["checkpoints"]) == before


def test_a_sampler_checkpoint_cannot_be_downloaded(cli: Cli, saved: dict[str, str], tmp_path: Path):
    with pytest.raises(Exception, match="cannot be downloaded"):
        cli("checkpoint", "download", saved["sampler"], "--output", str(tmp_path))


def test_an_adapter_is_pushed_to_the_hub(stack: Stack, saved: dict[str, str], tmp_path: Path):
    with hub() as there:
        own = {"HF_ENDPOINT": there.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        keys = {"TINKER_BASE_URL": stack.url, "TINKER_API_KEY": API_KEY}
        command = ["checkpoint", "push-hf", saved["external"], "--repo", "tester/adapter"]
        pushed = subprocess.run(
            [sys.executable, "-m", "tinker.cli", "--format", "json", *command],
            env={**os.environ, **own, **keys},
            capture_output=True,
            text=True,
        )
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(pushed.stdout)["repo_id"] == "tester/adapter"
    files = there.repos["tester/adapter"]
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(files)
    assert saved["external"] in files["README.md"].decode()
    assert f"base_model: {BASE}" in files["README.md"].decode()
    assert "tester/adapter" in there.private


def test_models_are_listed(cli: Cli):
    assert [model["model_name"] for model in cli("model", "list")["models"]] == [BASE]
    assert [model["model_name"] for model in cli("model", "list", "TINY-qwen3")["models"]] == [BASE]


def test_a_sessions_trace_is_exported(cli: Cli, stack: Stack, saved: dict[str, str], tmp_path: Path):
    session = run_of(saved["training"]).partition(":train:")[0]
    target = tmp_path / "trace.pftrace"
    cli("session", "export-trace", session, "--output", str(target))
    events = json.loads(target.read_text())["traceEvents"]
    assert {"create_model", "forward_backward", "optim_step", "save_weights"} <= {event["name"] for event in events}
    assert cli("session", "export-trace", session, "--url-only", text=True).startswith(stack.url)


def test_the_commands_that_say_where_one_is(cli: Cli):
    assert "Tinker accessible: yes" in cli("auth", "status", text=True)
    assert tinker.__version__ in cli("version", text=True)
