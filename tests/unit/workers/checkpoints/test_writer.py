"""Exports that only their recipients can read, and the place of files that are still to be uploaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pyrage
import pytest

from app.domain.checkpoints import MANIFEST
from app.domain.ops import SaveWeights
from app.domain.records import Checkpoint
from app.errors import Requeue
from app.stores.objects.folder import FolderStore
from tests import ssh_keys
from tests.unit.workers.conftest import MODEL, World
from workers.backends.training.base import ADAPTER_FILE, Writer
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


@pytest.mark.parametrize("kind", ssh_keys.KINDS)
def test_the_holder_of_an_ssh_key_reads_every_file(folder: Path, kind: str):
    key = ssh_keys.generate(kind)
    encrypt(folder, [key.public])
    identity = pyrage.ssh.Identity.from_buffer(key.private)
    assert {name: pyrage.decrypt((folder / f"{name}.age").read_bytes(), [identity]) for name in CONTENT} == CONTENT


def test_a_full_disk_is_noticed(folder: Path):
    (folder / "adapter_config.json.age").symlink_to("/dev/full")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(OSError, match="space"):
        encrypt(folder, [str(pyrage.x25519.Identity.generate().to_public())])


class KilledHere(FolderStore):
    """A folder store that keeps a copy of the folder of each upload beside it: what a process that is killed now
    leaves."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "secret", "http://x")
        self.left: list[Path] = []

    def put_new(self, key: str, source: Path | bytes) -> bool:
        if isinstance(source, Path):
            left = source.parent.with_name(f"left-{len(self.left)}")
            self.left.append(shutil.copytree(source.parent, left))
        return super().put_new(key, source)


def test_a_killed_save_leaves_nothing_behind_the_next_start_of_its_worker(world: World, tmp_path: Path):
    store = KilledHere(tmp_path / "objects")
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    world.admit(1, SaveWeights("weights", "kept"))
    worker.handle(1, "save_weights")
    assert store.left and all(any(left.iterdir()) for left in store.left)
    world.worker("b/1", store=store)
    assert all(left.is_dir() for left in store.left), "another worker may still write them"
    world.worker("a/2", store=store)
    assert not any(left.exists() for left in store.left)


def test_the_size_of_a_checkpoint_is_that_of_its_files(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, SaveWeights("weights", "kept"))
    worker.handle(1, "save_weights")
    checkpoint = world.records.find(Checkpoint, f"tinker://{MODEL}/weights/kept")
    assert checkpoint is not None
    files = (world.folder / "objects" / checkpoint.prefix).iterdir()
    sizes = {file.name: file.stat().st_size for file in files if file.name != MANIFEST}
    assert (checkpoint.files, checkpoint.size_bytes) == (sorted(sizes), sum(sizes.values()))
    assert ADAPTER_FILE in sizes


def test_only_weights_for_samplers_are_rounded(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    copied: list[bool] = []
    capture = worker.backend.capture

    def spy(model_id: str, **parts: bool) -> Writer:
        if not parts.get("gradients"):  # as for a snapshot
            copied.append(parts["rounded"])
        return capture(model_id, **parts)

    monkeypatch.setattr(worker.backend, "capture", spy)  # other tests share the backend
    kinds = [("weights", ""), ("sampler_weights", ""), ("sampler_weights", "session:sample:0")]
    for seq, (kind, session_id) in enumerate(kinds, 1):
        world.admit(seq, SaveWeights(kind, f"save-{seq}", sampling_session_id=session_id))
        worker.handle(seq, "save_weights")
    assert copied == [False, False, True]


@pytest.mark.parametrize(("least_free", "reason"), [(2**62, "free_disk_bytes"), (2**30, "MiB to be written")])
def test_a_save_waits_for_room_on_its_disk(world: World, monkeypatch: pytest.MonkeyPatch, least_free: int, reason: str):
    """Room for all of its files, and not only for the first one."""
    full = world.worker("a/1", free_disk_bytes=least_free)
    full.handle(0, "create_model")
    world.admit(1, SaveWeights("weights", "kept"))
    with monkeypatch.context() as patch, pytest.raises(Requeue, match=reason):
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30 + 10))
        full.handle(1, "save_weights")
    saved = world.worker("a/2").handle(1, "save_weights")
    assert saved is not None and not saved.failed


def test_a_save_that_an_earlier_try_wrote_is_not_written_again(world: World, monkeypatch: pytest.MonkeyPatch):
    """The earlier try may have lost its model meanwhile. If each try took as long, the model might go each time."""
    worker, op = world.worker("a/1"), SaveWeights("weights", "kept")
    worker.handle(0, "create_model")
    lease, saver = worker.owner.residents()[MODEL].lease, worker.snapshots._saver
    first = saver.save(lease, 1, op)()

    def write(folder: Path) -> None:
        raise AssertionError("it is written again")

    monkeypatch.setattr(worker.backend, "capture", lambda *_, **__: Writer(write, 0))
    assert saver.save(lease, 1, op)().result == first.result
