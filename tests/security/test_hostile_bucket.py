"""A hostile object store: an attacker who can write to it makes a worker open only harmless files.

These are safetensors, JSON and a tokenizer's files, in the folder that the worker reads.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import pytest

from app.domain.checkpoints import CheckpointPrefix, FileEntry, Manifest
from app.domain.ops import LoraSpec
from app.errors import BadRequest, ServerOpError
from app.stores.objects.folder import FolderStore
from workers.checkpoints import transfer

PREFIX = str(CheckpointPrefix("s:train:0", "weights", "a", 1, 1))
NAMES = ["adapter_model.bin", "weights.pt", "x.pkl", "all.tar", "model.py", "../up.json", "/tmp/x.json", "a/b.json"]
NAMES += [".hidden.json", "..json", "a.json\n", "a.json\x00.safetensors", "x.safetensors.pt"]


class _Explosive:
    """An object that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self._marker,)  # type: ignore[return-value]


def put(store: FolderStore, name: str, content: bytes) -> None:
    """Puts a checkpoint whose manifest names one file."""
    entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    lora = LoraSpec(rank=1, seed=0)
    manifest = Manifest("", "1-1", "s:train:0", "me", "b", lora, 1, 1, "now", {name: entry}, 1, "cpu")
    store.put_new(f"{PREFIX}/manifest.json", manifest.to_json())
    try:
        store.put_new(f"{PREFIX}/{name}", content)
    except BadRequest:
        return


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_manifest_that_names_another_kind_of_file_or_place_is_refused(tmp_path: Path, name: str) -> None:
    store, cache = FolderStore(tmp_path / "objects", "secret", "http://localhost"), tmp_path / "cache"
    marker = tmp_path / "went-off"
    put(store, name, pickle.dumps(_Explosive(marker)))
    with pytest.raises(ServerOpError, match="only safetensors, JSON and tokenizer files"):
        transfer.fetch(store, PREFIX, cache)
    assert not marker.exists()
    assert [path for path in cache.rglob("*") if path.is_file() and ".locks" not in path.parts] == []


@pytest.mark.parametrize("name", ["adapter_config.json", "merges.txt", "chat_template.jinja", "tokenizer.model"])
def test_what_lies_beside_a_checkpoint_without_being_named_is_not_even_fetched(tmp_path: Path, name: str) -> None:
    store, cache = FolderStore(tmp_path / "objects", "secret", "http://localhost"), tmp_path / "cache"
    put(store, name, b"{}")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../escaped"))
    store.put_new(f"{PREFIX}/adapter_model.bin", pickle.dumps(_Explosive(tmp_path / "went-off")))
    store.put_new(f"{PREFIX}/all.tar", archive.getvalue())
    folder = transfer.fetch(store, PREFIX, cache)
    assert {path.name for path in folder.iterdir()} == {name, "manifest.json"}
    assert not (tmp_path / "went-off").exists()
