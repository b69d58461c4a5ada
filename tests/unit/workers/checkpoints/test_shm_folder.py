from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.domain.checkpoints import MANIFEST, UNHASHED
from app.stores.objects.base import file_entry
from app.stores.objects.folder import FolderStore
from tests.full_disk import full_disk
from workers.checkpoints import transfer
from workers.checkpoints.shm_transfer import ShmFolder

MODEL = "session:train:0"


def prefix(seq: int, epoch: int = 1, model: str = MODEL) -> str:
    return f"models/{model}/sampler_weights/ephemeral-{seq}/{seq}-{epoch}"


def sealed(content: bytes = b"weights") -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "adapter.bin").write_bytes(content)
        about = {"path": "", "generation": "1-1", "model_id": MODEL, "owner": "me", "base_model": "base"}
        manifest = transfer.describe(folder, **about, lora=None, seq=1, epoch=1, hashed=False)
        transfer.seal(folder, manifest, UNHASHED)

    return fill


@pytest.fixture
def folder(tmp_path: Path) -> ShmFolder:
    return ShmFolder(tmp_path / "handover", 2**20)


def age(folder: ShmFolder, prefix: str) -> None:
    found = folder.find(prefix)
    assert found is not None
    os.utime(found, (time.time() - 3600,) * 2)


def test_what_is_written_can_be_taken_and_outlives_its_removal(folder: ShmFolder, tmp_path: Path):
    assert not folder.take(prefix(1), tmp_path / "taken")
    assert folder.write(prefix(1), sealed())
    assert folder.take(prefix(1), tmp_path / "taken")
    folder.remove(prefix(1))
    assert folder.find(prefix(1)) is None
    assert (tmp_path / "taken" / "adapter.bin").read_bytes() == b"weights"


def test_it_is_taken_onto_another_file_system_too(folder: ShmFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(target: Path, source: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    assert folder.write(prefix(1), sealed())
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert folder.take(prefix(1), tmp_path / "taken")
    assert (tmp_path / "taken" / "adapter.bin").read_bytes() == b"weights"


def test_what_is_there_stays_as_it_is(folder: ShmFolder, tmp_path: Path):
    """A sampler may have used it."""
    folder.write(prefix(1), sealed(b"first"))
    assert folder.write(prefix(1), sealed(b"other"))
    assert folder.take(prefix(1), tmp_path / "taken")
    assert (tmp_path / "taken" / "adapter.bin").read_bytes() == b"first"


def test_what_is_read_in_place_stays_until_its_last_reader_leaves(folder: ShmFolder):
    with folder.reading(prefix(1)) as found:
        assert found is None
    folder.write(prefix(1), sealed())
    with folder.reading(prefix(1)) as first:
        with folder.reading(prefix(1)) as second:
            assert first == second == folder.find(prefix(1))
        folder.remove(prefix(1))
        age(folder, prefix(1))
        folder.make_room(lambda prefix: False)
        assert first is not None
        assert (first / "adapter.bin").read_bytes() == b"weights"
    folder.make_room(lambda prefix: False)
    assert folder.find(prefix(1)) is None


def test_a_reader_that_waits_for_a_removal_finds_nothing(folder: ShmFolder, monkeypatch: pytest.MonkeyPatch):
    """It opened the folder before, and must not take it for one that is there."""
    flock = fcntl.flock

    def removed_meanwhile(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        folder.remove(prefix(1))
        folder.write(prefix(1), sealed(b"again"))
        flock(descriptor, how)

    folder.write(prefix(1), sealed())
    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with folder.reading(prefix(1)) as found:
        assert found is None


def test_a_reader_that_is_killed_keeps_nothing(folder: ShmFolder):
    folder.write(prefix(1), sealed())
    program = (
        "import sys; from pathlib import Path; from workers.checkpoints.shm_transfer import ShmFolder\n"
        "with ShmFolder(Path(sys.argv[1]), 2**20).reading(sys.argv[2]) as found: print(found, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(folder.root), prefix(1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == str(folder.find(prefix(1)))
        folder.remove(prefix(1))
        assert folder.find(prefix(1)) is not None
        reader.kill()
    folder.remove(prefix(1))
    assert folder.find(prefix(1)) is None


def test_a_checkpoint_that_would_leave_no_room_is_not_read_in_place(tmp_path: Path):
    """A sampler would keep it there for as long as it is loaded, and everybody's next weights would find no room."""
    folder = ShmFolder(tmp_path / "handover", 10_000)
    for seq, size in ((1, 3_300), (2, 3_400)):
        folder.write(prefix(seq), sealed(b"x" * size))
    with folder.reading(prefix(1)) as small, folder.reading(prefix(2)) as large:
        assert (small, large) == (folder.find(prefix(1)), None)


def test_a_file_system_without_locks_costs_a_warning(
    folder: ShmFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    folder.write(prefix(1), sealed())
    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder.reading(prefix(1)) as found:
        assert found is None
    folder.remove(prefix(1))
    assert "could not be removed from shared memory" in caplog.text
    assert not folder.write(prefix(2), sealed()), "another process would take it for a leftover"
    assert f"no shared-memory transfer of {prefix(2)}: [Errno 37] No locks available" in caplog.text


def by_an_earlier_version(folder: ShmFolder, prefix: str) -> Path:
    """Puts a checkpoint there as earlier versions do: without the suffix, and with the sha256 in the manifest."""
    target = folder.root / prefix.replace("/", ",")
    target.mkdir(parents=True)
    sealed()(target)
    (target / UNHASHED).unlink()
    about = {"path": "", "generation": "1-1", "model_id": MODEL, "owner": "me", "base_model": "base"}
    transfer.seal(target, transfer.describe(target, **about, lora=None, seq=1, epoch=1))
    return target


def test_what_an_earlier_version_wrote_is_taken_uploaded_and_removed(folder: ShmFolder, tmp_path: Path):
    earlier = by_an_earlier_version(folder, prefix(1))
    assert list(folder.prefixes()) == [prefix(1)]
    assert folder.take(prefix(1), tmp_path / "taken")
    assert (tmp_path / "taken" / "adapter.bin").read_bytes() == b"weights"
    with folder.reading(prefix(1)) as found:
        assert found is None, "an earlier version removes it whoever reads it"
    store = FolderStore(tmp_path / "objects", "secret", "http://x")
    transfer.complete(store, prefix(1), earlier)
    written = transfer.read_manifest(store, prefix(1))
    assert written.files["adapter.bin"] == file_entry(earlier / "adapter.bin")
    folder.remove(prefix(1))
    assert folder.find(prefix(1)) is None


def test_an_earlier_version_does_not_find_what_it_cannot_upload(folder: ShmFolder):
    """It rebuilds what it does not find. A folder without the sha256 would keep it from ending the transfer."""
    folder.write(prefix(1), sealed())
    assert not (folder.root / prefix(1).replace("/", ",")).exists()


def test_nothing_is_seen_of_what_is_being_written(folder: ShmFolder, tmp_path: Path):
    def look(target: Path) -> None:
        sealed()(target)
        assert folder.find(prefix(1)) is None
        assert not folder.take(prefix(1), tmp_path / "taken")
        assert list(folder.prefixes()) == []

    assert folder.write(prefix(1), look)
    assert list(folder.prefixes()) == [prefix(1)]


def test_no_more_than_its_bytes_are_taken(tmp_path: Path):
    folder = ShmFolder(tmp_path / "handover", 10_000)
    assert folder.write(prefix(1), sealed(b"x" * 6_000))
    assert not folder.write(prefix(2), sealed(b"x" * 6_000))
    assert list(folder.prefixes()) == [prefix(1)]
    assert [path.name for path in folder.root.iterdir() if path.name.startswith(".")] == [], "and nothing is left of it"


def test_nothing_is_written_that_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = ShmFolder(tmp_path / "handover", 10_000)
    assert folder.write(prefix(1), sealed(b"x" * 6_000), 6_000)
    assert not folder.write(prefix(2), lambda target: pytest.fail("it was"), 6_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=999, total=2**30))
    assert not folder.write(prefix(2), lambda target: pytest.fail("it was"), 1_000)


def test_half_of_a_small_file_system_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = ShmFolder(tmp_path / "handover", 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16_000, total=16_000))
    assert not folder.write(prefix(1), lambda target: pytest.fail("it was"), 8_001)
    assert folder.write(prefix(1), sealed(b"x" * 3_000), 3_000)
    assert not folder.write(prefix(2), sealed(b"x" * 5_500))
    with folder.reading(prefix(1)) as found:
        assert found is None, "three versions of this size have no room"


def test_a_folder_of_no_bytes_is_not_even_written_to(tmp_path: Path):
    folder = ShmFolder(tmp_path / "handover", 0)
    assert not folder.write(prefix(1), lambda target: pytest.fail("it was"))


def test_a_full_disk_is_no_error(folder: ShmFolder):
    with full_disk(4096):
        assert not folder.write(prefix(1), sealed(b"x" * 10_000))
    assert folder.find(prefix(1)) is None


def test_a_folder_somebody_else_made_under_its_name_is_not_used(
    folder: ShmFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder.write(prefix(1), sealed())
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not folder.write(prefix(2), sealed())
    assert f"{folder.root} is not a folder of user {user + 1}" in caplog.text
    assert not folder.take(prefix(1), tmp_path / "taken")


def test_earlier_versions_of_a_model_go_unless_they_are_needed(folder: ShmFolder):
    """The tenth is later than the ninth, and a later owner's later than both."""
    other = prefix(1, model="session:train:1")
    for one in (prefix(8), prefix(9), prefix(10), other):
        folder.write(one, sealed())
    folder.remove_older(prefix(10), {prefix(8)}.__contains__)
    assert set(folder.prefixes()) == {prefix(8), prefix(10), other}
    folder.write(prefix(9, epoch=2), sealed())
    folder.remove_older(prefix(9, epoch=2), {prefix(8)}.__contains__)
    assert set(folder.prefixes()) == {prefix(8), prefix(9, epoch=2), other}


def test_unneeded_files_that_were_not_just_written_make_room(folder: ShmFolder):
    for seq in (1, 2, 3):
        folder.write(prefix(seq), sealed())
    for seq in (1, 2):
        age(folder, prefix(seq))
    folder.write(prefix(4), sealed())
    folder.release(prefix(4))
    leftovers = [old(folder.root / name) for name in (".new-of-a-killed-process", ".gone-of-another")]
    folder.make_room({prefix(1)}.__contains__)
    assert set(folder.prefixes()) == {prefix(1), prefix(3)}
    assert not any(leftover.exists() for leftover in leftovers)


def test_what_is_being_written_for_long_is_not_taken_for_a_leftover(folder: ShmFolder, tmp_path: Path):
    def slowly(target: Path) -> None:
        (target / "first.bin").write_bytes(b"first")
        os.utime(target.parent, (time.time() - 3600,) * 2)
        ShmFolder(folder.root, folder.most_bytes).make_room(lambda prefix: False)
        sealed()(target)

    assert folder.write(prefix(1), slowly)
    assert folder.take(prefix(1), tmp_path / "taken")
    assert {file.name for file in (tmp_path / "taken").iterdir()} == {"first.bin", "adapter.bin"}


def old(folder: Path) -> Path:
    """A folder with one file, made an hour ago."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    os.utime(folder, (time.time() - 3600,) * 2)
    return folder


def test_folders_of_others_in_it_stay(folder: ShmFolder):
    """`engine.handover_dir` may name a folder that holds more."""
    others = [old(folder.root / name) for name in (".keep", "extension", "an extension")]
    folder.make_room(lambda prefix: False)
    assert all(other.is_dir() for other in others)
    assert list(folder.prefixes()) == []


def test_nothing_is_removed_behind_a_link_of_its_name(folder: ShmFolder, tmp_path: Path):
    """Another user may have made it."""
    folder.write(prefix(1), sealed())
    age(folder, prefix(1))
    leftover = old(folder.root / ".new-of-a-killed-process")
    link = ShmFolder(tmp_path / "link", 2**20)
    link.root.symlink_to(folder.root)
    link.make_room(lambda prefix: False)
    assert folder.find(prefix(1)) is not None
    assert leftover.is_dir()
    assert link.find(prefix(1)) is None
    assert not link.write(prefix(2), sealed())


def test_nothing_is_removed_from_the_folder_of_another_user(folder: ShmFolder, monkeypatch: pytest.MonkeyPatch):
    leftover, user = old(folder.root / ".new-of-a-killed-process"), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    folder.make_room(lambda prefix: False)
    assert leftover.is_dir()
