from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from app.stack import child as stack_child
from app.stack.child import Child, Command
from app.stack.signals import interrupted_by, stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_child_that_is_interrupted_before_its_program_runs_ends_by_the_signal(
    dispositions: None, number: signal.Signals
) -> None:
    """With the handler of its parent, subprocess would report a fault."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    me = os.getpid()

    def begin() -> None:
        stack_child.end_with(me)
        signal.raise_signal(number)

    with interrupted_by(number):
        assert subprocess.run([sys.executable, "-c", ""], preexec_fn=begin, check=False).returncode == -number


@pytest.mark.timeout(60)
def test_a_child_whose_supervisor_dies_before_its_program_runs_ends_too(tmp_path: Path) -> None:
    """Until then the child has the supervisor's handlers, which would only set a flag."""
    me = os.getpid()

    def at_each_line(*_: object) -> Any:
        signal.raise_signal(signal.SIGTERM)  # as the kernel does
        return at_each_line

    def into_the_child(frame: FrameType, *_: object) -> Any:
        return at_each_line if frame.f_code is stack_child.end_with.__code__ and os.getpid() != me else None

    child = Child(Command("short", (sys.executable, "-c", "")), tmp_path / "log")
    with stop_signals(signal.SIGTERM):
        sys.settrace(into_the_child)
        child.start()
        sys.settrace(None)
        while child.exit_code() is None:
            time.sleep(0.001)
    assert child.exit_code() == -signal.SIGTERM


def said_by(command: str, *arguments: str, folder: Path) -> list[str]:
    """The lines that a child, a Python, has written when it has ended."""
    child = Child(Command("speaker", (sys.executable, command, *arguments)), folder / "log")
    child.start()
    while child.exit_code() is None:
        time.sleep(0.001)
    return child.tail(100)


def test_no_file_of_the_current_folder_shadows_a_module_of_a_child_or_of_what_that_starts(tmp_path, monkeypatch):
    for name in ("app", "numpy"):
        (tmp_path / f"{name}.py").write_text("print('of the user')")
    monkeypatch.chdir(tmp_path)
    assert said_by("-m", "app.ids", folder=tmp_path) == []
    program = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'numpy'])"
    [said] = said_by("-c", program, folder=tmp_path)
    assert "'numpy' is a package and cannot be directly executed" in said


def test_a_child_reads_nothing_from_the_terminal_of_the_stack(tmp_path):
    terminal, keyboard = os.pipe()
    own = os.dup(0)
    os.dup2(terminal, 0)
    try:
        os.write(keyboard, b"typed")
        os.close(keyboard)
        assert said_by("-c", "import sys; print(repr(sys.stdin.read()))", folder=tmp_path) == ["''"]
    finally:
        os.dup2(own, 0)
        os.close(own)
        os.close(terminal)


def test_a_child_is_no_rank_of_the_job_in_which_the_stack_runs(tmp_path, monkeypatch):
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    groups = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE")
    given = (*ranks, *groups, "TORCHELASTIC_RUN_ID", "PET_NNODES", "SIZE", "NCCL_SOCKET_IFNAME")
    for name in given:
        monkeypatch.setenv(name, "1")
    show = f"import os; print(*(name for name in {given} if name in os.environ))"
    assert said_by("-c", show, folder=tmp_path) == ["SIZE NCCL_SOCKET_IFNAME"]


def test_a_checkout_that_is_run_from_its_own_folder_needs_no_installation(tmp_path, monkeypatch):
    shutil.copytree(Path(stack_child.__file__).parents[1], tmp_path / "app", ignore=shutil.ignore_patterns("static"))
    program = "import app, tomli_w; print(app.__file__)"
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys\nfrom app.stack.child import environment\n"
        f"subprocess.run([sys.executable, '-c', {program!r}], env=environment(os.environ))"
    )
    (tmp_path / "further").mkdir()
    (tmp_path / "further" / "tomli_w.py").touch()
    monkeypatch.setenv("PYTHONPATH", "further")
    found = subprocess.check_output([sys.executable, "-m", "parent"], cwd=tmp_path, text=True)
    assert found.splitlines() == [str(tmp_path / "app" / "__init__.py")]


def test_a_group_is_killed_once_for_each_start(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The kernel gives the number of an ended group to another one, which must live."""
    killed: list[int] = []
    kill_group = stack_child.kill_group
    monkeypatch.setattr(stack_child, "kill_group", lambda group: (killed.append(group), kill_group(group)))
    child = Child(Command("sleeper", (sys.executable, "-c", "import time; time.sleep(600)")), tmp_path / "log")
    started = []
    for _ in range(2):
        child.start()
        started.append(child.pid)
        child.kill_group()
        child.kill_group()
        assert child.exit_code() == -9
    assert killed == started


def test_a_large_log_is_moved_aside_and_its_process_goes_on_writing_to_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_child, "_LOG_BYTES", 64)
    program = (
        "import pathlib, time\n"
        "print('first ' * 20, flush=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "print('later', flush=True)\n"
        "time.sleep(600)"
    )
    child = Child(Command("talker", (sys.executable, "-c", program)), tmp_path / "log")
    child.start()
    try:
        _await_size(child.log, len("first " * 20 + "\n"))  # unbuffered output has the line and its end apart
        child.rotate_log()
        assert (tmp_path / "log.1").read_text() == "first " * 20 + "\n"
        assert child.log.read_bytes() == b""
        (tmp_path / "go").touch()
        _await_size(child.log, 6)
        assert child.log.read_bytes() == b"later\n", "it appends, and leaves no hole of the former size"
        assert child.tail(1) == ["later"]
        child.rotate_log()
        assert child.log.read_bytes() == b"later\n", "a small log stays"
    finally:
        child.kill_group()


def test_a_log_that_was_removed_ends_nothing(tmp_path: Path) -> None:
    child = Child(Command("sleeper", (sys.executable, "-c", "import time; time.sleep(600)")), tmp_path / "log")
    child.start()
    try:
        child.log.unlink()
        child.rotate_log()
        assert child.tail(1) == []
    finally:
        child.kill_group()


@pytest.mark.parametrize("name", [b"\xff", b") R 1 (\n"])
def test_a_process_of_any_name_has_its_place_in_the_family(name: bytes) -> None:
    """The kernel cuts a program's name after 15 bytes, also within a character."""
    program = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        found = stack_child.family(os.getpid())
        child.communicate(b"\n")
    assert {os.getpid(), child.pid} <= found


def _await_size(log: Path, least: int) -> None:
    deadline = time.monotonic() + 60
    while log.stat().st_size < least:
        assert time.monotonic() < deadline
        time.sleep(0.001)
