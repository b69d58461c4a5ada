"""A sampler starts alone on its GPUs, as vLLM counts memory that another worker takes meanwhile as its own."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.workers.conftest import await_true
from workers.process import gpu_start_locks
from workers.process.gpu_start_locks import starting, visible

_FOREVER_S = 60.0
SAMPLER, TRAINER = True, False


@dataclass
class Backend:
    """Notes when it opens and closes in `events`; with `others`, it is open until they are open too."""

    name: str
    events: list[str]
    others: threading.Barrier | None = None

    def open(self) -> None:
        self.events.append(f"{self.name} opens")
        if self.others is None:
            threading.Event().wait(0.05)
        else:
            self.others.wait(_FOREVER_S)
        self.events.append(f"{self.name} is open")


def start(backend: Backend, folder: Path, gpus: list[str], alone: bool) -> None:
    with starting(folder, gpus, alone=alone):
        backend.open()


def start_all(folder: Path, workers: list[tuple[list[str], bool]], *, together: bool = False) -> list[str]:
    """Starts workers, each with these GPUs, at the same time; returns their events."""
    events: list[str] = []
    others = threading.Barrier(len(workers)) if together else None
    with ThreadPoolExecutor(len(workers)) as pool:
        begun = [
            pool.submit(start, Backend(str(number), events, others), folder, gpus, alone)
            for number, (gpus, alone) in enumerate(workers)
        ]
    for each in begun:
        each.result()
    return events


@pytest.mark.parametrize(
    "workers",
    [
        [(["0"], TRAINER), (["0"], SAMPLER)],
        [(["0"], SAMPLER)] * 3,
        [(["0", "1"], TRAINER), (["1", "2"], SAMPLER), (["2", "0"], SAMPLER)],
    ],
)
def test_workers_on_a_gpu_with_a_sampler_start_one_after_another(
    workers: list[tuple[list[str], bool]], tmp_path: Path
) -> None:
    events = start_all(tmp_path, workers)
    assert len(events) == 2 * len(workers)
    assert all(one.split()[0] == other.split()[0] for one, other in list(pairwise(events))[::2]), events


@pytest.mark.parametrize(
    "workers",
    [
        [(["0"], SAMPLER), (["1"], SAMPLER), (["2"], TRAINER)],
        [(["0", "1"], TRAINER), (["1", "0"], TRAINER)],  # ranks of one trainer wait for each other
        [([], SAMPLER), ([], SAMPLER)],
    ],
)
def test_workers_on_other_gpus_and_trainers_start_together(
    workers: list[tuple[list[str], bool]], tmp_path: Path
) -> None:
    events = start_all(tmp_path, workers, together=True)
    assert all(event.endswith("opens") for event in events[: len(workers)])


def test_a_sampler_that_waits_for_one_gpu_says_so_and_keeps_nobody_from_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, gpu_start_locks.__name__)
    events: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        with starting(tmp_path, ["1"], alone=False):
            waiting = pool.submit(start, Backend("sampler", events), tmp_path, ["0", "1"], SAMPLER)
            await_true(lambda: "waiting for another worker" in caplog.text, "the sampler waits")
            pool.submit(start, Backend("other", events), tmp_path, ["0"], SAMPLER).result(_FOREVER_S)
        waiting.result(_FOREVER_S)
    assert events == ["other opens", "other is open", "sampler opens", "sampler is open"]


def test_a_worker_starts_without_locks_in_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with starting(tmp_path, ["0"], alone=True):
        monkeypatch.setattr(os, "getuid", partial(int, os.getuid() + 1))
        with starting(tmp_path, ["0"], alone=True):
            assert "another user" in caplog.text


def test_a_worker_starts_without_locks_on_a_disk_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(gpu_start_locks.fcntl, "flock", no_locks)
    with starting(tmp_path, ["0"], alone=True):
        assert "No locks available" in caplog.text


def test_a_child_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    with starting(tmp_path, ["0"], alone=True):
        pid = os.fork()
        if not pid:
            signal.pause()
    with ThreadPoolExecutor() as pool:
        try:
            pool.submit(start, Backend("next", []), tmp_path, ["0"], SAMPLER).result(60)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (None, ["0000:01:00.0", "0000:41:00.0", "0000:81:00.0"]),
        ("2,0", ["0000:81:00.0", "0000:01:00.0"]),
        (" 1 , GPU-c0", ["0000:41:00.0", "0000:81:00.0"]),
        ("GPU-a0-1,GPU-d0,MIG-a0", ["0000:01:00.0", "GPU-d0", "MIG-a0"]),
        ("", []),
    ],
)
def test_a_gpu_has_one_name_for_all_processes(
    listed: str | None, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, uuid in (("0000:41:00.0", "GPU-b0-1"), ("0000:01:00.0", "GPU-a0-1"), ("0000:81:00.0", "GPU-c0-1")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\n")
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    for for_cpus in (False, True):
        monkeypatch.setattr(gpu_start_locks, "torch_is_for_cpus", partial(bool, for_cpus))
        assert visible(environ, tmp_path) == ([] if for_cpus else found)
