"""Closed pages are read from the object store once, and never from a damaged or a full cache."""

from __future__ import annotations

import json
import uuid
import zlib
from pathlib import Path

import pytest

from app.stores.objects.folder import FolderStore
from app.stores.pages import LedgerPage, PageFiles

HOURS = range(472_222, 472_222 + 14 * 24)


class Reads(FolderStore):
    """A folder store that lists its reads."""

    keys: list[str]

    def read(self, key: str) -> bytes:
        self.keys.append(key)
        return super().read(key)


@pytest.fixture
def store(tmp_path: Path) -> Reads:
    store = Reads(tmp_path, "", "")
    store.keys = []
    for hour in HOURS:
        PageFiles(store).add(LedgerPage("usage", "me", hour), {"training base": str(hour)})
    return store


def test_a_closed_page_is_read_once(store: Reads) -> None:
    files = PageFiles(store)
    first, second = files.find("usage", "me", HOURS), files.find("usage", "me", HOURS)
    assert len(store.keys) == len(HOURS)
    assert first == second == {LedgerPage("usage", "me", hour): {"training base": str(hour)} for hour in HOURS}


def test_a_page_that_is_closed_later_is_found(store: Reads) -> None:
    files, later = PageFiles(store), LedgerPage("usage", "me", HOURS.stop)
    hours = range(HOURS.start, HOURS.stop + 1)
    files.find("usage", "me", hours)
    files.add(later, {"training base": "1"})
    assert files.find("usage", "me", hours)[later] == {"training base": "1"}


def test_the_pages_in_memory_take_a_bounded_number_of_bytes(store: Reads) -> None:
    newest = range(HOURS.stop - 10, HOURS.stop)
    pages = PageFiles(store).find("usage", "me", newest).values()
    packed = [zlib.compress(json.dumps(fields).encode(), 1) for fields in pages]
    files = PageFiles(store, cached_bytes=sum(map(len, packed)))
    files.find("usage", "me", HOURS)
    store.keys.clear()
    files.find("usage", "me", newest)
    assert store.keys == []
    files.find("usage", "me", newest[:1])
    files.find("usage", "me", HOURS[:1])
    assert len(store.keys) == 1
    files.find("usage", "me", newest[:1])
    assert len(store.keys) == 1, "it was used after the others"
    files.find("usage", "me", newest[1:2])
    assert len(store.keys) == 2, "the one that was not used for the longest time was given up"


def test_pages_are_kept_compressed_so_that_a_report_of_many_finds_them_in_memory(store: Reads) -> None:
    sessions = [str(uuid.uuid4()) for _ in range(50)]
    fields = {
        f"{kind} {session} base": "123456" for session in sessions for kind in ("training", "sampling", "prefill")
    }
    pages = [LedgerPage("usage", "many", hour) for hour in HOURS[:20]]
    files = PageFiles(store, cached_bytes=20 * len(json.dumps(fields)) // 3)
    for page in pages:
        files.add(page, fields)
    for _ in range(2):
        assert files.find("usage", "many", HOURS) == dict.fromkeys(pages, fields)
    assert len(store.keys) == len(pages)


def test_a_page_larger_than_the_memory_for_pages_is_read_each_time(store: Reads) -> None:
    files = PageFiles(store, cached_bytes=1)
    for _ in range(2):
        assert len(files.find("usage", "me", HOURS)) == len(HOURS)
    assert len(store.keys) == 2 * len(HOURS)


def test_a_damaged_page_is_read_again_once_it_is_mended(store: Reads, tmp_path: Path) -> None:
    files, page = PageFiles(store), LedgerPage("usage", "me", HOURS.start)
    (path,) = tmp_path.rglob("usage/me/2023-11-14/22.json")
    whole = path.read_bytes()
    path.write_text("{")
    assert page not in files.find("usage", "me", HOURS)
    path.write_bytes(whole)
    assert page in files.find("usage", "me", HOURS)
