"""Promises of the folder store beyond those of every ObjectStore."""

from __future__ import annotations

import hashlib
import hmac
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from app.errors import Forbidden, NotFound, SetupError, Unavailable
from app.settings import Settings, StoreSettings
from app.stores.objects import create
from app.stores.objects.folder import FolderStore
from tests.conformance.object_stores import KEY, PUBLIC, folder_settings


def test_without_a_url_the_objects_lie_in_the_data_folder(tmp_path: Path):
    create(Settings(data_dir=tmp_path)).put_new("a/b", b"1")
    assert (tmp_path / "objects" / "a" / "b").read_bytes() == b"1"


def test_a_write_that_breaks_off_is_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = create(folder_settings(tmp_path / "objects"))
    with pytest.raises(Unavailable):
        store.put_new("a/b", tmp_path / "no such source")
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(Unavailable, match="No space left"):
        store.put_new("a/b", b"1" * 100_000)
    assert store.list("") == []
    assert [p for p in (tmp_path / "objects").rglob("*") if p.is_file()] == []


def test_a_fetch_that_breaks_off_is_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = create(folder_settings(tmp_path / "objects"))
    store.put_new("a", b"1" * 100_000)
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(Unavailable):
        store.get("a", tmp_path / "cache" / "a")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path):
    create(folder_settings(tmp_path))
    old, young = tmp_path / ".unfinished" / "old", tmp_path / ".unfinished" / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert create(folder_settings(tmp_path)).list("") == []
    assert (old.exists(), young.exists()) == (False, True)


def test_writing_beside_a_delete_of_the_same_folder_succeeds(tmp_path: Path):
    store = create(folder_settings(tmp_path))

    def churn(name: str) -> None:
        for _ in range(150):
            assert store.put_new(f"m/deep/{name}", b"1")
            store.delete([f"m/deep/{name}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, "abcd"))
    assert not (tmp_path / "m").exists()


def test_a_key_below_another_key_is_an_error_and_not_a_silent_loss(tmp_path: Path):
    store = create(folder_settings(tmp_path))
    store.put_new("a", b"1")
    with pytest.raises(Unavailable, match="Not a directory"):
        store.put_new("a/b", b"2")


def test_a_changed_signature_or_expiry_is_refused(tmp_path: Path):
    store = create(folder_settings(tmp_path))
    assert isinstance(store, FolderStore)
    store.put_new(KEY, b"1")
    query = parse_qs(urlsplit(store.presign(KEY, 60)).query)
    expires, signature = int(query["expires"][0]), query["signature"][0]
    assert store.open_signed(KEY, expires, signature).read_bytes() == b"1"
    for bad in ("", "0" * 64, signature.upper(), signature[:-1], "ü"):
        with pytest.raises(Forbidden):
            store.open_signed(KEY, expires, bad)
    with pytest.raises(Forbidden):
        store.open_signed(KEY, expires + 1, signature)


def test_a_signed_url_of_a_deleted_object_is_not_found(tmp_path: Path):
    store = create(folder_settings(tmp_path))
    assert isinstance(store, FolderStore)
    store.put_new(KEY, b"1")
    url = urlsplit(store.presign(KEY, 60))
    store.delete([KEY])
    query = parse_qs(url.query)
    with pytest.raises(NotFound):
        store.open_signed(KEY, int(query["expires"][0]), query["signature"][0])


def test_a_signed_url_starts_with_the_public_url(tmp_path: Path):
    url = create(folder_settings(tmp_path)).presign("models/s:train:0/x", 60)
    assert url.startswith(f"{PUBLIC}/api/v1/objects/models/s%3Atrain%3A0/x?expires=")


def test_without_a_url_secret_nothing_can_be_signed(tmp_path: Path):
    store = create(Settings(data_dir=tmp_path))
    assert isinstance(store, FolderStore)
    with pytest.raises(NotFound, match="url_secret"):
        store.presign(KEY, 60)
    signature = hmac.new(b"", f"objects/{KEY}\n{2**40}".encode(), hashlib.sha256).hexdigest()
    with pytest.raises(Forbidden):
        store.open_signed(KEY, 2**40, signature)


@pytest.mark.parametrize("url", ["ftp://host/x", "file://relative/folder", "objects", "file://"])
def test_an_unusable_url_is_named(url: str):
    with pytest.raises(SetupError, match=url):
        create(Settings(store=StoreSettings(url=url)))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SetupError, match=r"set store\.url"):
        create(folder_settings(tmp_path / "file" / "objects"))


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")
