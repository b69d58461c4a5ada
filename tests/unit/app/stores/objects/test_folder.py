"""Concurrent writes of one key in a folder store, and a disk that goes. tests/conformance covers its other promises."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from app.errors import NotFound, SetupError, Unavailable
from app.stores.objects.folder import FolderStore


def test_who_is_overtaken_while_he_writes_changes_nothing(tmp_path: Path):
    """The writer had checked, and the key was free.

    Its source is a pipe, which shows when it reads and blocks it.
    """
    store, pipe, won = FolderStore(tmp_path / "objects", "secret", "http://x"), tmp_path / "pipe", list[bool]()
    os.mkfifo(pipe)
    slow = threading.Thread(target=lambda: won.append(store.put_new("a/key", pipe)), daemon=True)
    slow.start()
    with pipe.open("wb") as source:
        assert store.put_new("a/key", b"first")
        source.write(b"second")
    slow.join(60)
    assert (won, store.read("a/key")) == ([False], b"first")


def test_while_the_disk_is_not_mounted_nothing_is_said_to_be_missing(tmp_path: Path):
    """The mount point is an empty folder."""
    root, disk = tmp_path / "objects", tmp_path / "disk"
    store = FolderStore(root, "secret", "http://x")
    assert store.put_new("a/key", b"content")
    url = store.presign("a/key", 60)
    expires, signature = (part.partition("=")[2] for part in url.partition("?")[2].split("&"))
    root.rename(disk)
    root.mkdir()
    for call in (
        lambda: store.read("a/key"),
        lambda: store.get("a/key", tmp_path / "target"),
        lambda: store.size("a/key"),
        lambda: store.copy("a/key", "a/copy"),
        lambda: store.list("a/"),
        lambda: store.delete(["a/key"]),
        lambda: store.put_new("a/other", b"content"),
        lambda: store.open_signed("a/key", int(expires), signature),
    ):
        with pytest.raises(Unavailable):
            call()
    root.rmdir()
    disk.rename(root)
    assert store.read("a/key") == b"content"
    with pytest.raises(NotFound):
        store.read("a/missing")


def test_what_lies_below_an_object_is_missing(tmp_path: Path):
    store = FolderStore(tmp_path, "secret", "http://x")
    store.put_new("a/key", b"content")
    for call in (lambda: store.read("a/key/below"), lambda: store.get("a/key/below", tmp_path / "target")):
        with pytest.raises(NotFound):
            call()


def test_what_a_file_server_hides_in_each_folder_is_no_object(tmp_path: Path):
    """Such as its snapshots."""
    store, hidden = FolderStore(tmp_path / "objects", "secret", "http://x"), tmp_path / "objects" / "a" / ".snapshot"
    store.put_new("a/b/key", b"content")
    hidden.mkdir()
    (hidden / "key").write_bytes(b"of yesterday")
    assert (store.list("a/"), store.folders("a/")) == (["a/b/key"], ["b"])


@pytest.mark.parametrize(
    ("root", "folder", "file"), [(0o2770, 0o770, 0o660), (0o777, 0o777, 0o666), (0o755, 0o700, 0o600)]
)
def test_users_who_may_write_to_the_folder_share_its_files_whatever_the_umask(
    tmp_path: Path, root: int, folder: int, file: int
):
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects").chmod(root)
    before = os.umask(0o077)
    try:
        store = FolderStore(tmp_path / "objects", "secret", "http://x")
        store.put_new("a/b/key", b"content")
        store.replace("a/c/key", io.BytesIO(b"content"))
        store.copy("a/b/key", "d/key")
    finally:
        os.umask(before)
    made = sorted((tmp_path / "objects").glob("**/*"))
    assert len(made) == 8
    assert {each.stat().st_mode & 0o777 for each in made if each.is_dir()} == {folder}
    assert {each.stat().st_mode & 0o777 for each in made if each.is_file()} == {file}
    assert {bool(each.stat().st_mode & 0o2000) for each in made if each.is_dir()} == {bool(root & 0o2000)}


def test_a_disk_without_hard_links_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as exFAT and vfat: every other call works there, and no file could ever be stored."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(SetupError, match=r"hard links .*ext4.* set store\.url"):
        FolderStore(tmp_path / "objects", "secret", "http://x")
    monkeypatch.undo()
    FolderStore(tmp_path / "objects", "secret", "http://x")
    assert [path.name for path in (tmp_path / "objects").rglob("*")] == [".unfinished"], "the try leaves nothing"


def test_an_outage_is_counted_and_a_missing_object_is_none(tmp_path: Path):
    def outages() -> float:
        return REGISTRY.get_sample_value("tinsmith_object_store_outages_total") or 0.0

    store, before = FolderStore(tmp_path / "objects", "secret", "http://x"), outages()
    with pytest.raises(NotFound):
        store.read("a/key")
    assert outages() == before
    (tmp_path / "objects").rename(tmp_path / "away")
    with pytest.raises(Unavailable):
        store.read("a/key")
    assert outages() == before + 1
