"""The next start removes shared memory of processes that were all killed, and keeps that of others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from mmap import PROT_READ, mmap
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from app.stack import child
from workers.sample import shared_memory

SHARED = Path("/dev/shm")
# A grandchild holds a segment and a semaphore, as vLLM's engine does, and writes the segment's name when it has them.
PROGRAM = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from workers.sample import shared_memory

def hold(names):
    segment = SharedMemory(create=True, size=4096)
    names.put(segment.name)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    names = context.Queue()
    context.Process(target=hold, args=(names,)).start()
    name = names.get()
    shared_memory.note(Path(sys.argv[1]))
    print(name, flush=True)
    time.sleep(600)
"""


def in_shared_memory() -> set[str]:
    return {entry.name for entry in SHARED.iterdir() if entry.name.startswith(("psm_", "sem."))}


@pytest.fixture
def own() -> Iterator[str]:
    """A segment that another process uses."""
    segment = SharedMemory(create=True, size=4096)
    yield segment.name
    segment.close()
    segment.unlink()


def noted_and_killed(tmp_path: Path) -> tuple[Path, str]:
    """The note of a process that was killed with all its descendants, and the name of their segment."""
    program, file = tmp_path / "program.py", tmp_path / "run" / "note"
    program.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(program), str(file)], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in family:  # stop all of them first, so that none can clean up after another one
            each.send_signal(signal.SIGSTOP)
        for each in family:
            each.kill()
        psutil.wait_procs(family)
    assert len(family) == 3, "this one, the one that holds the segment, and the resource tracker"
    return file, name


def test_a_file_with_a_name_in_another_encoding_does_not_hide_the_segments(own: str, tmp_path: Path):
    path = tmp_path / os.fsdecode(b"mod\xe8le")
    path.write_bytes(b"weights")
    with path.open("rb") as file, mmap(file.fileno(), 0, prot=PROT_READ):
        shared_memory.note(tmp_path / "note")
    assert own in json.loads((tmp_path / "note").read_text())


def test_what_processes_that_were_all_killed_left_is_removed_and_nothing_else(own: str, tmp_path: Path):
    before = in_shared_memory()
    file, name = noted_and_killed(tmp_path)
    left = in_shared_memory()
    assert name in left - before
    shared_memory.remove_noted(file)
    assert left - in_shared_memory() >= {name}
    assert own in in_shared_memory()
    assert not file.exists()


def test_a_segment_that_got_the_name_of_one_that_is_gone_stays(tmp_path: Path):
    file, name = noted_and_killed(tmp_path)
    (SHARED / name).rename(SHARED / f"{name}-old")
    later = SharedMemory(name, create=True, size=4096)
    try:
        shared_memory.remove_noted(file)
        assert (SHARED / name).exists()
    finally:
        (SHARED / f"{name}-old").unlink()
        later.close()
        later.unlink()


def test_without_a_note_nothing_is_removed(own: str, tmp_path: Path):
    shared_memory.remove_noted(tmp_path / "none")
    assert own in in_shared_memory()


@pytest.mark.parametrize("name", ["psm_0", "sem.0", "torch_0", "nccl-0", "vllm_dist_0-tp:0-[0-1]-cpushm_0"])
def test_each_kind_that_an_engine_maps_is_noted(name: str, tmp_path: Path):
    file = SHARED / f"{name}-{os.getpid()}"
    file.write_bytes(bytes(4096))
    try:
        with file.open("rb") as opened, mmap(opened.fileno(), 0, prot=PROT_READ):
            shared_memory.note(tmp_path / "note")
    finally:
        file.unlink()
    assert file.name in json.loads((tmp_path / "note").read_text())


def test_what_its_owner_removes_meanwhile_is_no_error(tmp_path: Path):
    """Others make and remove shared memory all the time. A dangling link is listed, but has no inode either."""
    gone = SHARED / f"psm_gone_{os.getpid()}"
    gone.symlink_to("nowhere")
    try:
        shared_memory.note(tmp_path / "note")
    finally:
        gone.unlink()
    assert gone.name not in (tmp_path / "note").read_text()


def test_a_machine_without_shared_memory_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path / "none")
    shared_memory.note(tmp_path / "note")
    assert (tmp_path / "note").read_text() == "{}"


def test_only_what_is_mapped_is_noted(own: str, tmp_path: Path):
    (SHARED / f"psm_{os.getpid()}").touch()
    try:
        shared_memory.note(tmp_path / "note")
    finally:
        (SHARED / f"psm_{os.getpid()}").unlink()
    assert own in (tmp_path / "note").read_text()
    assert f"psm_{os.getpid()}" not in (tmp_path / "note").read_text()


def test_a_child_that_ends_meanwhile_does_not_hide_the_segments_of_the_others(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    monkeypatch.setattr(child, "family", lambda pid: [ended.pid, pid])
    shared_memory.note(tmp_path / "note")
    assert own in json.loads((tmp_path / "note").read_text())
