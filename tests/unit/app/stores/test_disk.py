"""The bound of free disk. A bound that no disk can keep stands for a disk that is nearly full; tests/contract fills a
real one."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import Unavailable
from app.stores.disk import Disk, TemporaryCopies
from app.stores.objects import FolderStore
from workers.checkpoints.snapshot_upload import SnapshotFolder

MOST = 2**62


def test_a_disk_with_room_has_no_shortage(tmp_path: Path):
    assert Disk("data_dir", tmp_path, 1).shortage() == ""
    assert Disk("data_dir", tmp_path, 0).shortage() == ""


def test_a_shortage_names_the_disk_and_the_setting_and_no_folder(tmp_path: Path):
    shortage = Disk("data_dir", tmp_path, MOST).shortage()
    assert shortage.startswith("the disk of data_dir has ") and "engine.free_disk_bytes" in shortage
    assert str(tmp_path) not in shortage


def test_a_folder_store_adds_no_file_to_a_disk_that_is_nearly_full_and_still_deletes(tmp_path: Path):
    FolderStore(tmp_path, "", "").put_new("kept", b"1")
    store = FolderStore(tmp_path, "", "", MOST)
    with pytest.raises(Unavailable, match=r"the object store has .*free_disk_bytes"):
        store.put_new("new", b"2")
    with pytest.raises(Unavailable, match="free_disk_bytes"):
        store.replace("kept", io.BytesIO(b"3"))
    assert store.read("kept") == b"1"
    store.delete(["kept"])
    assert store.list("") == []
    assert list((tmp_path / ".unfinished").iterdir()) == []


def test_a_snapshot_waits_for_room_on_its_disk(tmp_path: Path):
    def fill(folder: Path) -> None:
        (folder / "file").write_bytes(b"1")

    full, free = (SnapshotFolder(tmp_path, "node", least) for least in (MOST, 0))
    with pytest.raises(Unavailable, match="free_disk_bytes"):
        full.write("session:train:0", 3, 1, fill)
    with pytest.raises(Unavailable, match="MiB to be written"):
        SnapshotFolder(tmp_path, "node", 1).write("session:train:0", 3, 1, fill, MOST)
    assert free.write("session:train:0", 3, 1, fill).path.is_dir()


def test_a_copy_counts_only_with_the_bytes_that_are_not_on_the_disk_yet(monkeypatch: pytest.MonkeyPatch):
    free = 50
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    copies = TemporaryCopies(10)
    with copies.folder(20) as first:
        with pytest.raises(Unavailable, match="MiB to be written"), copies.folder(21):
            pass
        (first / "file").write_bytes(bytes(15))
        free -= 15
        with copies.folder(20):
            pass
        with pytest.raises(Unavailable), copies.folder(21):
            pass
    assert not first.exists()
