"""`tinsmith models` lists base models, and refuses one that the hub does not give in one sentence."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from app import cli
from app.commands import model_files, models
from app.demo import model as bundled
from app.stack.data_folder import DataFolder
from tests.hub_of_models import Hub, hub_of_models
from tests.unit.app.commands.test_doctor import model_folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of_models() as found:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        files = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield found


def refused(hub_id: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence of `tinsmith models add` that ends with code 2, before any file is fetched."""
    assert cli.main(["models", "add", hub_id]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err.strip()


def test_a_gated_and_an_unknown_model_are_refused(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hub.repos["org/gated"] = model_folder(tmp_path / "gated")
    hub.gated.add("org/gated")
    assert refused("org/gated", capsys) == (
        "tinsmith: org/gated is gated: ask for access on the Hugging Face hub, and set HF_TOKEN to a token that has it"
    )
    assert refused("org/none", capsys) == (
        "tinsmith: the Hugging Face hub has no model org/none, or it is private and HF_TOKEN may not read it"
    )
    assert hub.sent == []


def test_a_hub_that_is_away_or_switched_off_is_said(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    said = refused("org/m", capsys)
    assert said.startswith("tinsmith: cannot download org/m: ") and "Connection refused" in said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused("org/m", capsys) == "tinsmith: HF_HUB_OFFLINE is set: unset it to download org/m"


def test_what_cannot_be_a_model_here_is_refused(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model_folder(tmp_path / "mine")
    assert "mine is a local folder, so there is nothing to download; `tinsmith init --model mine` writes" in refused(
        "mine", capsys
    )
    assert "there is no folder './no'" in refused("./no", capsys)
    hub.repos["org/old"] = model_folder(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "old" / "pytorch_model.bin")
    assert "org/old has no safetensors files on the Hugging Face hub; other formats" in refused("org/old", capsys)
    assert hub.sent == []


def test_a_model_larger_than_the_free_disk_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    hub.repos["org/m"] = model_folder(tmp_path / "m")
    disk = shutil.disk_usage(tmp_path)
    size = sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=size - 1))
    said = refused("org/m", capsys)
    assert "org/m has 0.0 GiB to download, but" in said and "set HF_HOME to a folder on another disk" in said
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))  # it wins over HF_HOME
    assert "set HF_HUB_CACHE to a folder on another disk" in refused("org/m", capsys)
    assert hub.sent == []


@pytest.mark.parametrize("part", ["", "models--org--m/snapshots", ".locks/models--org--m"])
def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(
    part: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Root may write everywhere, so a file lies where the cache has a folder."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    hub.repos["org/m"] = model_folder(tmp_path / "m")
    taken = tmp_path / "cache" / part
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.touch()
    assert refused("org/m", capsys) == (
        f"tinsmith: org/m cannot be downloaded into the Hugging Face cache {tmp_path}/cache: {taken}: Not a directory; "
        "set HF_HOME to a folder that this user can write"
    )
    assert hub.sent == []


def test_a_model_that_is_here_needs_no_cache_that_can_be_written(
    reported: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub.repos["org/m"] = model_folder(tmp_path / "m")
    assert cli.main(["models", "add", "org/m"]) == 0

    def refuses(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_files.tempfile, "TemporaryFile", refuses)
    assert cli.main(["models", "add", "org/m"]) == 0


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA can train the model."""
    about = {"architecture": "A", "parameters": 2_500_000_000, "max_context": 8, "trainable_groups": ["attn"]}
    monkeypatch.setattr(models, "_report", lambda _: {**about, "never_adapted": {"mtp": "it drafts"}})


@pytest.mark.parametrize("terminal", ["1", "0"])
def test_only_a_terminal_shows_the_progress(
    terminal: str,
    reported: None,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    hub.repos["org/m"] = model_folder(tmp_path / "m")
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["models", "add", "org/m"]) == 0
    output = capsys.readouterr()
    size = sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    assert (f"100% {size}/{size} bytes" in Text.from_ansi(output.err).plain) == (terminal == "1")
    assert (output.err == "") == (terminal == "0") and "\x1b" not in output.out


def test_the_part_that_is_here_is_shown_during_a_download(tmp_path: Path):
    shown = StringIO()
    (tmp_path / "of another revision").write_bytes(b"0" * 1000)
    (tmp_path / "begun.incomplete").write_bytes(b"0" * 20)
    with models.drawn_progress(Console(file=shown, force_terminal=True, width=80), tmp_path, 100):
        (tmp_path / "more.incomplete").write_bytes(b"0" * 55)
        deadline = time.monotonic() + 60
        while " 75% 75/100 bytes" not in Text.from_ansi(shown.getvalue()).plain:
            assert time.monotonic() < deadline, shown.getvalue()
            time.sleep(0.05)


def test_a_download_that_broke_off_is_continued(
    reported: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hub.repos["org/m"] = model_folder(tmp_path / "m")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.cut_off.add("org/m")
    assert cli.main(["models", "add", "org/m"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("tinsmith: cannot download org/m: ") and last.endswith("; run the command again to go on")
    hub.cut_off.clear()
    hub.sent.clear()
    assert cli.main(["models", "add", "org/m"]) == 0
    assert hub.sent == ["model.safetensors"]
    assert capsys.readouterr().out.splitlines()[:3] == [
        "A, 2.50 billion parameters, 8 tokens of context",
        "LoRA on attn; never on mtp",
        "to download: 0.0 GiB",
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_has_models_of_the_settings_and_of_the_cache(
    columns: int, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from huggingface_hub import snapshot_download

    monkeypatch.setenv("COLUMNS", str(columns))
    hub.repos = {"org/m": model_folder(tmp_path / "m"), "org/part": tmp_path / "m"}
    snapshot_download("org/m")
    snapshot_download("org/part", allow_patterns=["*.json"])
    assert cli.main(["models", "--data-dir", "data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and "\x1b" not in "".join(lines)
    assert [line.split() for line in lines[1:]] == [
        [bundled.NAME, "in", "the", "settings", "-", "bundled"],
        ["org/m", "downloaded", "0.0", "GiB", "org/m"],
    ]
    Path("t.toml").write_text('[[base_models]]\nname = "own"\npath = "m"\n[[base_models]]\nname = "b"\npath = "org/m"')
    assert cli.main(["models", "--config", "t.toml", "--data-dir", "data", "--json"]) == 0
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert json.loads(capsys.readouterr().out) == [
        {"name": "own", "state": "in the settings", "weight_bytes": size, "source": "m"},
        {"name": "b", "state": "in the settings", "weight_bytes": size, "source": "org/m"},
    ]


def test_models_of_a_running_stack_are_served(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = DataFolder(tmp_path / "data")
    base = '[[base_models]]\nname = "own"\npath = "org/own"'
    (folder.run / "settings.toml").write_text(f'data_dir = "{folder.root}"\n{base}')
    assert cli.main(["models", "--data-dir", "data", "--json"]) == 0
    assert [(one["name"], one["state"]) for one in json.loads(capsys.readouterr().out)] == [("own", "served")]
    folder.close()
