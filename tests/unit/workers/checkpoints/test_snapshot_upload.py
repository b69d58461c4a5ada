from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.domain.ops import LoraSpec
from app.stores.redis.types import Lease
from tests.full_disk import full_disk
from workers.checkpoints import transfer
from workers.checkpoints.snapshot_upload import LocalSnapshot, SnapshotFolder

MODEL = "3b1f:train:0"


def fill(seq: int, epoch: int, size: int = 100) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(bytes([seq % 256]) * size)
        manifest = transfer.describe(
            folder,
            path="",
            generation=f"{seq}-{epoch}",
            model_id=MODEL,
            owner="me",
            base_model="tiny",
            lora=LoraSpec(4),
            seq=seq,
            epoch=epoch,
        )
        transfer.seal(folder, manifest)

    return write


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotFolder:
    return SnapshotFolder(tmp_path / "snapshots", "a")


def written(folder: SnapshotFolder, *generations: tuple[int, int]) -> list[LocalSnapshot]:
    return [folder.write(MODEL, seq, epoch, fill(seq, epoch)) for seq, epoch in generations]


def lease(epoch: int = 9, applied: int = 100, durable: int = -1) -> Lease:
    return Lease(MODEL, "a/1", epoch, applied, "prefix" if durable >= 0 else "", durable)


def usable(folder: SnapshotFolder, lease: Lease) -> list[tuple[int, int]]:
    return [(local.seq, local.epoch) for local, manifest in folder.usable(lease) if manifest.seq == local.seq]


def names(folder: SnapshotFolder) -> list[str]:
    return sorted(path.name for path in (folder.root / MODEL).iterdir())


def test_the_newest_comes_first_and_of_one_seq_the_last_owners(folder: SnapshotFolder):
    written(folder, (8, 2), (10, 2), (10, 3), (9, 4))
    assert usable(folder, lease()) == [(10, 3), (10, 2), (9, 4), (8, 2)]


def test_a_snapshot_that_could_not_be_finished_is_not_there_and_disturbs_no_other(folder: SnapshotFolder):
    written(folder, (8, 2))

    def stops(target: Path) -> None:
        fill(9, 2)(target)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        folder.write(MODEL, 9, 2, stops)
    assert names(folder) == ["8-2"]
    assert usable(folder, lease()) == [(8, 2)]


def test_a_full_disk_leaves_the_old_one_as_it_was(folder: SnapshotFolder):
    written(folder, (8, 2))
    with full_disk(10_000), pytest.raises(OSError, match="too large"):
        folder.write(MODEL, 9, 2, fill(9, 2, size=100_000))
    assert names(folder) == ["8-2"]
    assert usable(folder, lease()) == [(8, 2)]


def test_what_a_killed_process_left_half_written_is_never_used_and_soon_gone(folder: SnapshotFolder):
    half = folder.root / MODEL / ".a"
    half.mkdir(parents=True)
    fill(9, 2)(half)
    assert usable(folder, lease()) == []
    written(folder, (9, 2))
    assert names(folder) == ["9-2"]


def test_what_is_there_is_not_written_again(folder: SnapshotFolder):
    written(folder, (8, 2))

    def never(target: Path) -> None:
        raise AssertionError("written twice")

    assert folder.write(MODEL, 8, 2, never) == written(folder, (8, 2))[0]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "no manifest"])
def test_a_damaged_one_is_dropped_and_the_next_one_used(folder: SnapshotFolder, damage: str):
    _, newest = written(folder, (8, 2), (9, 2))
    weights = newest.path / "weights"
    match damage:
        case "changed":
            weights.write_bytes(b"x" * 100)
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "gone":
            weights.unlink()
        case "no manifest":
            (newest.path / "manifest.json").unlink()
    assert usable(folder, lease()) == [(8, 2)]
    assert names(folder) == ["8-2"]


def test_one_behind_the_trimmed_journal_or_ahead_of_it_is_not_used(folder: SnapshotFolder):
    """Ahead: the state server was set back to an earlier state, and the journal has diverged since."""
    written(folder, (7, 2), (8, 2), (9, 2), (10, 2), (11, 2))
    assert usable(folder, lease(applied=10, durable=8)) == [(10, 2), (9, 2), (8, 2)]
    assert names(folder) == ["10-2", "8-2", "9-2"]


def test_what_belongs_to_a_history_that_was_lost_is_removed(folder: SnapshotFolder):
    written(folder, (8, 2), (9, 70), (10, 71))
    owner = Lease(MODEL, "a/1", 72, 100, "prefix", 7, epoch_floor=71)
    assert usable(folder, owner) == [(10, 71)]
    assert names(folder) == ["10-71"]


def test_an_owner_that_was_replaced_neither_uses_nor_removes_what_its_successor_wrote(folder: SnapshotFolder):
    mine, other, *_ = written(folder, (8, 2), (6, 2), (8, 3), (12, 3))
    assert usable(folder, lease(epoch=2, applied=8)) == [(8, 2), (6, 2)]
    folder.prune(MODEL, mine)
    assert names(folder) == ["12-3", "8-2", "8-3"]
    assert not other.path.exists()


def test_pruning_spares_what_is_being_uploaded(folder: SnapshotFolder):
    _, sent, newest = written(folder, (7, 2), (8, 2), (9, 2))
    folder.prune(MODEL, newest, keep=sent)
    assert names(folder) == ["8-2", "9-2"]


def test_models_are_kept_apart_and_forgotten_completely(folder: SnapshotFolder):
    written(folder, (8, 2))
    folder.write("other:train:0", 3, 1, fill(3, 1))
    assert folder.models() == [MODEL, "other:train:0"]
    folder.forget(MODEL)
    folder.forget("unknown")
    assert folder.models() == ["other:train:0"]
    assert usable(folder, lease()) == []
