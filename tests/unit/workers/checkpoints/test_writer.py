"""Exports that only their recipients can read."""

from __future__ import annotations

from pathlib import Path

import pyrage
import pytest

from workers.checkpoints.writer import encrypt

CONTENT = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": b"\x00" * 300_000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in CONTENT.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_each_recipient_reads_every_file_and_nobody_else_any(folder: Path):
    keys = [pyrage.x25519.Identity.generate() for _ in range(2)]
    encrypt(folder, [str(key.to_public()) for key in keys])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {f"{name}.age" for name in CONTENT}
    for key in keys:
        assert {name: pyrage.decrypt(files[f"{name}.age"], [key]) for name in CONTENT} == CONTENT
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files["adapter_config.json.age"], [pyrage.x25519.Identity.generate()])


def test_a_full_disk_is_noticed(folder: Path):
    (folder / "adapter_config.json.age").symlink_to("/dev/full")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(OSError, match="space"):
        encrypt(folder, [str(pyrage.x25519.Identity.generate().to_public())])
