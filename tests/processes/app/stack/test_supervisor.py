from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.stack.supervisor import RestartPolicy
from tests.processes.app.stack.running import alive, eventually, numbers, start

NOTE_PID = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n');"
SLEEP = NOTE_PID + "time.sleep(600)"
DIE_ONCE = NOTE_PID + "sys.exit(1) if len(open(sys.argv[1]).readlines()) == 1 else time.sleep(600)"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEP
PARENT = f"""
import subprocess, sys
for new_session in (False, True):
    subprocess.Popen([sys.executable, "-c", {SLEEP!r}, sys.argv[1]], start_new_session=new_session)
"""


@contextmanager
def supervised(
    tmp_path: Path, *programs: tuple[str, ...], ready: str = "", window_s: float = 60, kills: str = ""
) -> Iterator[subprocess.Popen[str]]:
    process = start("supervise", str(tmp_path), json.dumps(programs), ready, str(window_s), kills)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(120)


def test_a_dead_child_is_started_again(tmp_path):
    pids = tmp_path / "pids"
    with supervised(tmp_path, ("worker", DIE_ONCE, str(pids))) as process:
        assert eventually(lambda: len(numbers(pids)) == 2)
        first, second = numbers(pids)
        assert first != second and alive(second)
        assert stop(process) == 0


def test_a_killed_child_is_started_again(tmp_path):
    pids = tmp_path / "pids"
    with supervised(tmp_path, ("worker", SLEEP, str(pids))):
        assert eventually(lambda: len(numbers(pids)) == 1)
        subprocess.run(["kill", "-9", str(numbers(pids)[0])], check=True)
        assert eventually(lambda: len(numbers(pids)) == 2)


@pytest.mark.parametrize(
    ("number", "kills", "cause"),
    [
        (9, 0, "was ended by signal 9 (SIGKILL)"),
        (9, 1, "was ended by signal 9 (SIGKILL): the kernel was out of memory"),
        (11, 1, "was ended by signal 11 (SIGSEGV)"),
    ],
)
def test_a_death_is_reported_with_its_cause(tmp_path, number, kills, cause):
    pids, counted = tmp_path / "pids", tmp_path / "vmstat"
    counted.write_text("nr_free_pages 7\noom_kill 3\n")
    with supervised(tmp_path, ("worker", SLEEP, str(pids)), kills=str(counted)) as process:
        assert eventually(lambda: len(numbers(pids)) == 1)
        counted.write_text(f"nr_free_pages 7\noom_kill {3 + kills}\n")
        subprocess.run(["kill", f"-{number}", str(numbers(pids)[0])], check=True)
        assert eventually(lambda: len(numbers(pids)) == 2)
        assert stop(process) == 0
        said = process.stderr.read()
    assert said == f"worker {cause}; starting it again in 0.01 s (log: {tmp_path / 'worker.log'})\n"


def test_a_child_that_keeps_dying_ends_the_stack_with_the_end_of_its_log(tmp_path):
    with supervised(tmp_path, ("worker", "import sys; sys.exit('out of luck')")) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "TinsmithError: worker ended with code 1, 3 times in a row" in output
    assert output.rstrip().endswith("out of luck")


def test_a_child_that_dies_after_each_long_start_ends_a_stack_that_is_not_ready(tmp_path):
    with supervised(tmp_path, ("worker", "import sys; sys.exit('out of luck')"), window_s=0) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "TinsmithError: worker ended with code 1, 3 times in a row" in output


@pytest.mark.parametrize("code", [1, 2])
def test_a_child_that_was_ready_does_not_end_a_stack_that_starts(code: int, tmp_path):
    deaths = tmp_path / "deaths"
    worker = ("worker", NOTE_PID + f"sys.exit({code})", str(deaths))
    with supervised(tmp_path, worker, ready="child") as process:
        assert eventually(lambda: len(numbers(deaths)) > 6)
        assert stop(process) == 0


def test_a_child_that_keeps_dying_does_not_end_a_stack_that_was_ready(tmp_path):
    deaths = tmp_path / "deaths"
    with supervised(tmp_path, ("worker", NOTE_PID + "sys.exit(1)", str(deaths)), ready="stack") as process:
        assert eventually(lambda: len(numbers(deaths)) > 6)
        assert stop(process) == 0


def test_a_child_with_a_setup_error_is_started_again_in_a_stack_that_was_ready(tmp_path):
    """The cause may be temporary, such as a GPU's memory that is not free yet.

    Each report gives the child's own last words.
    """
    starts = tmp_path / "starts"
    refuse = NOTE_PID + "print('worker: no such model'); sys.exit(2)"
    with supervised(tmp_path, ("worker", refuse, str(starts)), ready="stack") as process:
        assert eventually(lambda: len(numbers(starts)) > 6)
        process.terminate()
        _, reports = process.communicate(timeout=120)
    assert process.returncode == 0
    assert reports.count("worker: no such model; starting it again in ") >= 6


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("noise\nno such model: give another", "no such model: give another"),
        ("noise\nworker: no such model\nnoise of a launcher", "worker: no such model"),
        ("", "worker cannot start"),
    ],
)
def test_a_child_with_a_setup_error_ends_the_stack_with_what_it_said_in_one_line(tmp_path, said, shown):
    with supervised(tmp_path, ("worker", f"import sys; print({said!r}); sys.exit(2)")) as process:
        output, _ = process.communicate(timeout=120)
    assert output.splitlines()[1:] == [f"SetupError: {shown} (log: {tmp_path / 'worker.log'})"]
    assert process.returncode == 3


LOG_BECOMES_A_FOLDER = NOTE_PID + "os.remove(sys.argv[2]); os.mkdir(sys.argv[2]); sys.exit(1)"


def test_a_restart_that_fails_is_tried_again(tmp_path):
    """The machine may have no room for a process, or the log's folder may be gone for a while."""
    pids, log = tmp_path / "pids", tmp_path / "worker.log"
    failed = f"worker cannot be started: [Errno 21] Is a directory: '{log}'; starting it again in 0.02 s (log: {log})\n"
    with supervised(tmp_path, ("worker", LOG_BECOMES_A_FOLDER, str(pids), str(log)), ready="stack") as process:
        assert [process.stderr.readline() for _ in range(3)][1:] == [failed, failed]
        log.rmdir()
        assert eventually(lambda: len(numbers(pids)) > 1)


def test_restarts_that_keep_failing_end_a_stack_that_was_not_ready(tmp_path):
    pids, log = tmp_path / "pids", tmp_path / "worker.log"
    with supervised(tmp_path, ("worker", LOG_BECOMES_A_FOLDER, str(pids), str(log))) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    assert f"worker cannot be started: [Errno 21] Is a directory: '{log}', 3 times in a row" in output


def test_a_child_whose_model_is_unservable_runs_once_and_the_others_go_on(tmp_path):
    runs, deaths = tmp_path / "runs", tmp_path / "deaths"
    refused = NOTE_PID + r"print('worker: no \x1b[1mlinear fits'); sys.exit(3)"
    programs = ("worker", refused, str(runs), "--base", "a"), ("other", NOTE_PID + "sys.exit(1)", str(deaths))
    with supervised(tmp_path, *programs, ready="stack") as process:
        reported = next(line for line in process.stderr if line.startswith("worker"))
        assert reported.startswith(r"worker: no \x1b[1mlinear fits (log: "), "no terminal obeys what is in a log"
        before = len(numbers(deaths))
        assert eventually(lambda: len(numbers(deaths)) > before + 6)
        process.send_signal(signal.SIGTERM)
        _, reports = process.communicate(timeout=120)
    assert len(numbers(runs)) == 1
    assert "\nworker" not in reports


def test_an_api_whose_processes_cannot_start_is_started_again(tmp_path):
    """gunicorn, which serves no base model, exits with 3 when a process of it cannot load the application."""
    starts = tmp_path / "starts"
    with supervised(tmp_path, ("api", NOTE_PID + "sys.exit(3)", str(starts)), ready="stack") as process:
        assert eventually(lambda: len(numbers(starts)) > 2)
        assert stop(process) == 0


def test_stopping_ends_children_of_children_even_in_sessions_of_their_own(tmp_path):
    pids = tmp_path / "pids"
    with supervised(tmp_path, ("worker", PARENT + SLEEP, str(pids))) as process:
        assert eventually(lambda: len(numbers(pids)) == 3)
        assert stop(process) == 0
        assert not any(alive(pid) for pid in numbers(pids))


def test_what_a_dead_child_leaves_behind_is_ended_before_it_starts_again(tmp_path):
    leftovers, pids = tmp_path / "leftovers", tmp_path / "pids"
    die_once = f"sys.argv[1] = {str(pids)!r};" + DIE_ONCE
    wait_for_both = f"\nwhile open({str(leftovers)!r}, 'a+').tell() == 0: pass\n"
    with supervised(tmp_path, ("worker", PARENT + wait_for_both + die_once, str(leftovers))):
        assert eventually(lambda: len(numbers(pids)) == 2 and len(numbers(leftovers)) >= 3)
        second = numbers(pids)[1]
        living = [pid for pid in numbers(leftovers) if alive(pid)]
        assert alive(second) and len(living) <= 2


def test_the_background_processes_of_the_shell_that_became_the_supervisor_are_left_alone(tmp_path):
    pids, stranger = tmp_path / "pids", tmp_path / "stranger"
    supervise = [sys.executable, "-m", "tests.processes.app.stack.stand_in", "supervise", str(tmp_path)]
    command = shlex.join([*supervise, json.dumps([("worker", DIE_ONCE, str(pids))]), "", "60", ""])
    shell = f"sleep 600 & echo $! > {stranger}; exec {command}"
    with subprocess.Popen(["bash", "-c", shell], stdout=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: len(numbers(pids)) == 2)
            assert alive(numbers(stranger)[0])
            assert stop(process) == 0
            assert alive(numbers(stranger)[0]) and not alive(numbers(pids)[1])
        finally:
            process.kill()
            subprocess.run(["kill", "-9", str(numbers(stranger)[0])], check=False)


SHARE = (
    NOTE_PID
    + """
import multiprocessing.shared_memory, signal
segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
print("segment", segment.name, flush=True)
"""
)


@pytest.mark.parametrize("ending", ["is killed", "is killed by the supervisor"])
def test_the_shared_memory_of_a_child_that_is_killed_is_removed(tmp_path, ending):
    """Python's resource tracker removes it. The tracker is in the child's process group and gets the time it needs."""
    pids, log = tmp_path / "pids", tmp_path / "worker.log"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with supervised(tmp_path, ("worker", SHARE + ignore + "time.sleep(600)", str(pids))) as process:
        assert eventually(lambda: log.exists() and log.read_text().endswith("\n"))
        segment = Path("/dev/shm", log.read_text().split()[1])
        assert segment.exists()
        if ending == "is killed":
            subprocess.run(["kill", "-9", str(numbers(pids)[0])], check=True)
            assert eventually(lambda: len(numbers(pids)) == 2)
        else:
            assert stop(process) == 0
        assert not segment.exists()


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    pids = tmp_path / "pids"
    with supervised(tmp_path, ("worker", IGNORE_SIGTERM, str(pids))) as process:
        assert eventually(lambda: len(numbers(pids)) == 1)
        assert stop(process) == 0
        assert not alive(numbers(pids)[0])


def test_children_end_when_the_supervisor_is_killed(tmp_path):
    pids = tmp_path / "pids"
    with supervised(tmp_path, ("worker", SLEEP, str(pids))) as process:
        assert eventually(lambda: len(numbers(pids)) == 1)
        process.kill()
        assert eventually(lambda: not alive(numbers(pids)[0]))


@pytest.mark.parametrize(("failures", "delay_s"), [(1, 0.5), (2, 1.0), (4, 4.0), (9, 10.0), (5_000, 10.0)])
def test_the_pause_before_a_restart_doubles_up_to_a_limit(failures, delay_s):
    assert RestartPolicy().delay_s(failures) == delay_s
