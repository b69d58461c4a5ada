"""The id of a base model's weights is that of its tensors, however they lie in files, and costs a few short reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hub_of_models import hub_of_models, use_hub
from tests.models import tiny_qwen3
from workers.models.loading.weights_id import weights_id

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "model")


def with_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    save_file(dict(tensors), folder / _FILE)
    return weights_id(str(folder))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_it_is_16_digits_and_the_same_for_a_copy_with_another_configuration(base: Path, folder: Path):
    (folder / "config.json").write_text("{}")
    save_file(load_file(base / _FILE), folder / _FILE, {"format": "pt", "made by": "another program"})
    assert weights_id(str(folder)) == weights_id(str(base))
    assert len(weights_id(str(base))) == 16 and int(weights_id(str(base)), 16)


def test_it_is_the_same_for_the_tensors_in_other_files(base: Path, folder: Path):
    tensors = load_file(folder / _FILE)
    (folder / _FILE).unlink()
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(reversed(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / _INDEX).write_text(json.dumps({"weight_map": places}))
    assert weights_id(str(folder)) == weights_id(str(base))


@pytest.mark.parametrize("place", [0, 32, -1])
def test_it_is_another_for_another_number_at_the_start_in_the_middle_or_at_the_end_of_a_tensor(
    place: int, base: Path, folder: Path
):
    tensors = load_file(folder / _FILE)
    tensors[_NORM][place] += 1
    assert with_tensors(folder, tensors) != weights_id(str(base))


def test_it_is_another_for_another_name_shape_or_dtype_of_the_same_bytes(base: Path, folder: Path):
    tensors = load_file(folder / _FILE)
    norm = tensors.pop(_NORM)
    others = ({"model.other.weight": norm}, {_NORM: norm[None]}, {_NORM: norm.view(torch.int32)}, {})
    found = [with_tensors(folder, {**tensors, **other}) for other in others]
    assert len({*found, weights_id(str(base))}) == 5


def test_every_kind_of_weight_is_sampled_in_a_model_of_64_equal_layers(folder: Path):
    kinds = ("input_layernorm", "mlp.down_proj", "mlp.up_proj", "self_attn.q_proj")
    tensors = {f"model.layers.{i}.{kind}.weight": torch.ones(8) for i in range(64) for kind in kinds}
    found = {with_tensors(folder, tensors)}
    for kind in kinds:
        changed = {name: tensor + 1 if kind in name else tensor for name, tensor in tensors.items()}
        found.add(with_tensors(folder, changed))
    assert len(found) == 5


def test_it_reads_the_header_and_some_kilobytes_of_a_large_file(tmp_path: Path):
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(1000)]
    size = 2 * 1024 * 4096
    fields = {
        name: {"dtype": "BF16", "shape": [1024, 4096], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    header = json.dumps(fields).encode()
    with (tmp_path / _FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + len(names) * size)  # 8 GB, of which the disk holds the header alone
    weights_id(str(tmp_path))
    before = bytes_read()
    assert weights_id(str(tmp_path))
    assert bytes_read() - before < len(header) + 100_000


def test_files_may_be_in_folders_that_the_index_names(base: Path, folder: Path):
    (folder / "part").mkdir()
    (folder / _FILE).rename(folder / "part" / "a.safetensors")
    names = load_file(folder / "part" / "a.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "part/a.safetensors")}))
    assert weights_id(str(folder)) == weights_id(str(base))


def test_a_model_without_safetensors_files_has_none(folder: Path):
    (folder / _FILE).rename(folder / "pytorch_model.bin")
    assert weights_id(str(folder)) == ""


def test_a_missing_or_damaged_file_is_an_error(folder: Path):
    (folder / _FILE).rename(folder / "model-0.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors is missing"):
        weights_id(str(folder))
    (folder / _INDEX).unlink()
    whole = (folder / "model-0.safetensors").read_bytes()
    (folder / _FILE).write_bytes(whole[:-1])
    with pytest.raises(
        OSError, match=rf"has {len(whole) - 1} bytes, and its tensors end at {len(whole)}; copy it again"
    ):
        weights_id(str(folder))
    (folder / _FILE).write_bytes(b"\1\0\0\0\0\0\0\0{")
    with pytest.raises(Exception, match="its header is not JSON"):
        weights_id(str(folder))


def test_that_of_a_hub_id_is_that_of_its_files_in_the_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with hub_of_models() as hub:
        use_hub(monkeypatch, hub.url, tmp_path)
        hub.repos["org/tiny"] = base
        assert weights_id("org/tiny") == ""
        snapshot_download("org/tiny")
        asked = len(hub.asked)
        assert weights_id("org/tiny") == weights_id(str(base))
        assert len(hub.asked) == asked
