"""A setup that cannot work ends `tinsmith up` with exit code 2 and one line, and no process is restarted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def up(folder: Path, base: Path | str, toml: str = "", **environ: str) -> tuple[int, list[str]]:
    """Exit code and lines of `tinsmith up`."""
    config = folder / "tinsmith.toml"
    config.write_text(f'[[base_models]]\nname = "tiny"\npath = "{base}"\n{toml}')
    command = ["up", "--quiet", "--config", str(config), "--data-dir", str(folder / "data"), "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.warm_workers", *command],
        capture_output=True,
        text=True,
        # Simulates a machine without a GPU; with DS_ACCELERATOR, DeepSpeed does not print that it found none.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environ},
        timeout=600,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("toml", "worker"),
    [
        ("trainer.devices = [0, 1]\ntrainer.ranks = 2", "trainer-0: trainer.devices"),
        ("sampler.devices = [0, 1]", "sampler-0: sampler.devices"),
    ],
)
def test_gpus_that_are_not_there_end_it(toml: str, worker: str, base_path: Path, tmp_path: Path):
    code, [line] = up(tmp_path, base_path, toml)
    assert line.startswith(f"tinsmith: {worker} is [0, 1], but torch sees no GPU here")
    assert code == 2


def test_a_model_without_weights_ends_it(base_path: Path, tmp_path: Path):
    folder = shutil.copytree(base_path, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    code, [line] = up(tmp_path, folder, 'sampler.backend = "vllm"')
    assert f"base model 'tiny' cannot be loaded from '{folder}': " in line and "model.safetensors" in line
    assert code == 2


def test_a_hub_that_cannot_be_reached_ends_it_with_the_way_to_name_a_local_folder(tmp_path: Path):
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "cache")}
    code, [line] = up(tmp_path, "org/model", **hub)
    assert "base model 'tiny' cannot be loaded from 'org/model' on the Hugging Face hub" in line
    assert "the hub cannot be reached ([Errno 111] Connection refused)" in line
    assert "or give a local folder: --base-model tiny=/path/to/folder" in line
    assert code == 2
