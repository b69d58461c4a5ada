"""`tinsmith init` writes a config file that fits the machine, and never replaces one unasked."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from app import cli, settings
from app.demo import model
from app.stack import config, hardware
from app.stack.config import Options
from app.stack.data_folder import DataFolder
from app.stack.hardware import Gpu, Hardware
from app.stack.up import prepare
from tests.unit.app.commands.test_doctor import installed
from tests.unit.app.stack.test_terminal import HOSTILE

GIB = 2**30
TWO_GPUS = Hardware(
    tuple(Gpu(number, "NVIDIA H100 80GB HBM3", 80 * GIB) for number in range(2)), 26, 200 * GIB, bfloat16=True
)
CPU = Hardware((), 2, 16 * GIB, bfloat16=False)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "find", lambda: CPU)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find", lambda: TWO_GPUS)


def tiny_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    return folder


@pytest.mark.parametrize("columns", [80, 120])
def test_output_says_what_was_found_and_how_to_start(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(columns))
    with_gpus(monkeypatch)
    assert cli.main(["init", "my settings.toml", "--model", "Qwen/Qwen3-0.6B"]) == 0
    out, error = capsys.readouterr()
    assert error == "" and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= columns
    assert out.replace("\n  ", " ").splitlines() == [
        "GPU 0: NVIDIA H100 80GB HBM3, 80.0 GiB",
        "GPU 1: NVIDIA H100 80GB HBM3, 80.0 GiB",
        "The base model is Qwen/Qwen3-0.6B. Its weights are not here yet: `tinsmith models add Qwen/Qwen3-0.6B` "
        "downloads them.",
        "1 GPU for the trainer, 1 sampler on 1 GPU each.",
        "wrote my settings.toml; start the stack with `tinsmith up --config 'my settings.toml'`",
    ]
    assert stat.S_IMODE(Path("my settings.toml").stat().st_mode) == 0o600, "it may hold secrets later"


def test_gpus_that_a_cpu_build_of_torch_does_not_use_are_a_line_beside_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, 00000000:3B:00.0, NVIDIA H100 80GB HBM3, 81559, 4, GPU-1'\n")
    smi.chmod(0o755)
    monkeypatch.setattr(hardware, "NVIDIA_SMI", str(smi))
    installed(tmp_path, monkeypatch, torch="2.13.0+cpu")
    assert cli.main(["init", "--json"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["file"] == "tinsmith.toml"
    assert error.startswith("torch 2.13.0+cpu is a CPU build, so workers do not use this machine's GPUs; run ")
    assert error.count("\n") == 1


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["init", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "file": "tinsmith.toml",
        "hardware": {"gpus": [], "cores": 2, "memory_bytes": 16 * GIB, "bfloat16": False},
        "base_model": None,
        "reasons": [f"The base model is {model.NAME}, the bundled one.", "Trainer and sampler use the CPU."],
        "start": "tinsmith up --config tinsmith.toml",
    }
    assert settings.load(Path("tinsmith.toml"), {}) == settings.defaults({})


def test_the_bundled_model_uses_one_of_several_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with_gpus(monkeypatch)
    assert cli.main(["init", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["hardware"]["gpus"]) == 2
    assert said["reasons"][1:] == ["Trainer and sampler share the GPU."]


def test_a_file_that_exists_stays_unless_forced(capsys: pytest.CaptureFixture[str]):
    file = Path("tinsmith.toml")
    file.write_text("mine")
    assert cli.main(["init"]) == 2
    assert capsys.readouterr().err == (
        "tinsmith: tinsmith.toml exists and stays as it is; name another file, or give --force to replace it\n"
    )
    assert file.read_text() == "mine"
    assert cli.main(["init", "--force"]) == 0
    assert settings.load(file, {}) == settings.defaults({})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "/no/such"), "base model '/no/such': there is no folder '/no/such'; give"),
        (("--model", "."), "has no config.json; give a folder in Hugging Face format"),
        (("no/such/file.toml",), "cannot write no/such/file.toml: No such file or directory; name another file"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_no_file(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["init", *arguments]) == 2
    output = capsys.readouterr()
    assert said in output.err and output.err.count("\n") == 1 and output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_served_under_its_name_whatever_that_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = HOSTILE.replace("\x00", "")
    tiny_model(tmp_path / name)
    assert cli.main(["init", "--model", name]) == 0
    (base,) = settings.load(Path("tinsmith.toml"), {}).base_models
    assert (base.name, base.path) == (name, str(tmp_path / name))
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_the_server_reads_the_file_and_places_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "find", lambda: replace(TWO_GPUS, gpus=TWO_GPUS.gpus[:1]))
    monkeypatch.setattr(hardware, "torch_is_for_cpus", lambda: False)
    tiny_model(tmp_path / "my-model")
    assert cli.main(["init", "--model", "my-model"]) == 0
    options = Options(config=Path("tinsmith.toml"), port=0, data_dir=tmp_path / "data")
    folder = DataFolder(tmp_path / "data")
    plan = prepare(config.resolve(options, {}), options, folder, gpus=lambda: [0])
    folder.close()
    (base,) = plan.settings.base_models
    assert (base.name, base.path) == ("my-model", str(tmp_path / "my-model"))
    assert base.trainer.devices == base.sampler.devices == ((0,),)
    assert base.trainer.memory_share == base.sampler.memory_share == 0.45
