from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.domain.checkpoints import FileEntry
from app.errors import NotFound, ServerOpError, Unavailable
from app.stores.objects.folder import FolderStore
from workers.checkpoints import transfer

PREFIX = "models/m/weights/w/1-1"
KEY = f"{PREFIX}/file"
CONTENT = b"0123456789" * 1000
ENTRY = FileEntry(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
CUT, WRONG, AWAY = CONTENT[:-1], b"x" + CONTENT[1:], None


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the time limit: attempts are counted here, and their duration only shows how busy the machine was."""
    monkeypatch.setattr(transfer, "_WITHIN_S", 3600.0)


class Line(FolderStore):
    """A store behind a bad line: `answers` replace the next answers; None is an outage."""

    def __init__(self, root: Path, answers: list[bytes | None]) -> None:
        super().__init__(root, "secret", "http://localhost")
        self.answers: Iterator[bytes | None] = iter(answers)
        self.asked = 0

    def get(self, key: str, target: Path) -> None:
        target.write_bytes(self.read(key))

    def read(self, key: str) -> bytes:
        self.asked += 1
        answer = next(self.answers, CONTENT)
        if answer is None:
            raise Unavailable("away")
        return answer


@pytest.mark.parametrize("answers", [[], [CUT], [CUT, b"", AWAY], [AWAY, AWAY, AWAY], [WRONG], [CUT, WRONG]])
def test_what_was_cut_short_or_spoiled_on_its_way_is_fetched_again(tmp_path: Path, answers: list[bytes | None]):
    line = Line(tmp_path / "objects", answers)
    transfer.fetch_file(line, KEY, tmp_path / "file", ENTRY)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert line.asked == len(answers) + 1


@pytest.mark.parametrize("answer", [CUT, CONTENT + b"0", AWAY])
def test_what_never_comes_whole_is_put_off_and_not_called_damaged(tmp_path: Path, answer: bytes | None):
    line = Line(tmp_path / "objects", [answer] * 100)
    with pytest.raises(Unavailable):
        transfer.fetch_file(line, KEY, tmp_path / "file", ENTRY)
    assert 2 <= line.asked <= 10


def test_what_is_whole_and_wrong_twice_is_damaged(tmp_path: Path):
    line = Line(tmp_path / "objects", [WRONG, CUT, WRONG])
    with pytest.raises(ServerOpError, match=f"{KEY} is damaged"):
        transfer.fetch_file(line, KEY, tmp_path / "file", ENTRY)
    assert line.asked == 3


def test_what_is_missing_is_not_asked_for_again(tmp_path: Path):
    class Missing(Line):
        def read(self, key: str) -> bytes:
            self.asked += 1
            raise NotFound(key)

    line = Missing(tmp_path, [])
    with pytest.raises(NotFound):
        transfer.fetch_file(line, KEY, tmp_path / "file", ENTRY)
    assert line.asked == 1


def test_a_manifest_that_was_cut_short_is_read_again(tmp_path: Path):
    line = Line(tmp_path / "objects", [b'{"schema_ver', AWAY, b""])
    with pytest.raises(ServerOpError, match="is not valid"):
        transfer.read_manifest(line, PREFIX)
    assert line.asked == 4
