"""A model that cannot be loaded is a SetupError of one line, for the trainer and both samplers alike."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from app.errors import SetupError
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
from workers.backends.sampling import vocabulary
from workers.models import base_model
from workers.models.loading.source import explained

Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def settings(path: Path | str, **given: Any) -> BaseModelSettings:
    return BaseModelSettings(name="tiny", path=str(path), dtype="float32", **given)


def refusal(load: Callable[[BaseModelSettings], Any], path: Path | str, **given: Any) -> str:
    with pytest.raises(SetupError) as caught:
        load(settings(path, **given))
    return str(caught.value)


def config(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def text(name: str, written: str) -> Break:
    return lambda folder: (folder / name).write_text(written) and None


def without_a_weight(folder: Path) -> None:
    """transformers would make a random one."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def one_shard_missing(folder: Path) -> None:
    pickled(folder)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {"a": "missing.safetensors"}}')


def linked_out_of_the_container(folder: Path) -> None:
    """A folder of the hub's cache that is mounted into a container, where its links lead nowhere."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/elsewhere/model.safetensors")


def load_split(settings: BaseModelSettings) -> Any:
    """As a rank whose shares are empty."""

    def split(_: str, parameter: nn.Parameter) -> None:
        parameter.data = torch.empty(0, dtype=parameter.dtype)

    return base_model.load(settings, split=split)


CUSTOM = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
BOTH = {
    "no JSON": (text("config.json", "{oops"), "is not a valid JSON file"),
    "empty": (text("config.json", "{}"), "its config.json names no model_type"),
    "unknown": (config(model_type="unheard-of"), "the installed transformers does not know its architecture"),
    "custom": (config(model_type="own", auto_map=CUSTOM), "it needs Python code from its repository"),
    "no text": (config(model_type="clip"), "its architecture does not generate text"),
    "wrong type": (config(num_hidden_layers="two"), "Field 'num_hidden_layers' expected int, got str"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "pickled": (pickled, "model.safetensors"),
    "cut off": (cut_off, "file not fully covered"),
    "link": (linked_out_of_the_container, f"user {os.getuid()} cannot read model.safetensors"),
    "shard": (one_shard_missing, "missing.safetensors"),
}


@pytest.mark.parametrize("load", [base_model.load, load_split, base_model.skeleton])
@pytest.mark.parametrize("case", BOTH)
def test_a_folder_that_cannot_be_loaded_is_named_with_the_cause(load: Any, case: str, folder: Path) -> None:
    break_it, said = BOTH[case]
    break_it(folder)
    message = refusal(load, folder)
    assert message.startswith(f"base model 'tiny' cannot be loaded from '{folder}': ")
    assert said in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize("load", [base_model.load, load_split])
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (config(hidden_size=128), "its weights do not have the shapes that its config.json gives"),
        (config(vocab_size=400), "its weights do not have the shapes that its config.json gives"),
        (
            config(quantization_config={"quant_method": "gptq", "bits": 4}),
            "packed weights that Tinsmith does not read (gptq)",
        ),
        (config(architectures=None), "its config.json names no architectures"),
        (without_a_weight, "model.layers.1.mlp.up_proj.weight is missing"),
    ],
)
def test_weights_that_do_not_fit_are_named_with_the_cause(load: Any, break_it: Break, said: str, folder: Path) -> None:
    break_it(folder)
    assert said in refusal(load, folder)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_head_that_is_stored_beside_its_embedding_is_tied_if_it_is_the_same(change: float, folder: Path) -> None:
    """Split parameters would all look the same."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (base_model.load, load_split):
        model = load(settings(folder)).model
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (change == 0)


def test_all_parameters_but_those_that_are_tied_are_split(folder: Path) -> None:
    model = load_split(settings(folder)).model
    assert [name for name, parameter in model.named_parameters() if len(parameter)] == ["model.embed_tokens.weight"]


def test_split_parameters_have_one_dtype_as_deepspeed_demands(tmp_path: Path) -> None:
    """transformers keeps Inkling's convolutions in fp32."""
    given = BaseModelSettings(name="tiny", path=str(architectures.build("inkling", tmp_path)), dtype="bfloat16")
    assert {parameter.dtype for parameter in base_model.load(given).model.parameters()} > {torch.bfloat16}
    assert {parameter.dtype for parameter in load_split(given).model.parameters()} == {torch.bfloat16}


def test_a_tokenizer_that_cannot_be_loaded_is_named(folder: Path, whole: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    for given in ({"path": folder}, {"path": whole, "tokenizer": str(folder)}):
        message = refusal(vocabulary.load_vocabulary, **given)
        assert message.startswith(f"the tokenizer of base model 'tiny' cannot be loaded from '{folder}': ")


def test_a_folder_beside_the_files_that_its_user_may_not_read_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example lost+found, where the model has its own disk. Root may read everything, so the test replaces
    os.access."""
    (folder / "lost+found").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "lost+found")
    assert base_model.load(settings(folder)).info.name == "tiny"


@pytest.mark.parametrize("path", ["/no/such/folder", "./no-such-folder"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(path: str) -> None:
    for load in (base_model.load, base_model.skeleton):
        assert refusal(load, path) == f"base model 'tiny': there is no folder {path!r}; correct its path"


def test_a_hub_id_that_is_not_in_the_cache_of_an_offline_machine_names_the_local_form() -> None:
    message = refusal(base_model.load, "no-such-owner/no-such-model")
    assert message == (
        "base model 'tiny' cannot be loaded from 'no-such-owner/no-such-model' on the Hugging Face hub: HF_HUB_OFFLINE "
        "is set, and this machine's cache does not have it; or give a local folder: --base-model "
        "tiny=/path/to/folder"
    )


def test_a_hub_tokenizer_names_the_setting_that_takes_a_folder(whole: Path) -> None:
    message = refusal(vocabulary.load_vocabulary, whole, tokenizer="no-such-owner/no-such-model")
    assert "the tokenizer of base model 'tiny' cannot be loaded from 'no-such-owner/no-such-model'" in message
    assert message.endswith('tokenizer = "/path/to/folder"')


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_hub_cache_that_cannot_be_written_is_named_with_the_remedy(code: int) -> None:
    with pytest.raises(SetupError) as caught, explained(settings("org/m")):
        try:
            raise OSError(code, os.strerror(code), "/.cache")
        except OSError as error:
            raise OSError("Common causes: 1) another user is downloading the same model") from error
    assert str(caught.value) == (
        "base model 'tiny' cannot be loaded from 'org/m' on the Hugging Face hub: /.cache: "
        f"{os.strerror(code)}; set HF_HOME to a folder that this user can write; or give a local folder: "
        "--base-model tiny=/path/to/folder"
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError()])
def test_running_out_of_memory_may_pass_so_it_is_no_setup_error(error: Exception, whole: Path) -> None:
    with pytest.raises(type(error)), explained(settings(whole)):
        raise error


def test_running_out_of_memory_may_pass_also_where_a_share_is_kept(whole: Path) -> None:
    def split(_: str, parameter: nn.Parameter) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        base_model.load(settings(whole), split=split)
