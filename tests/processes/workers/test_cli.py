"""The GPUs that the processes of a worker are bound to. There is no GPU here: the tests read what each process was
given when it started, before it imported torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import Settings, TrainerSettings
from workers import cli

# Python runs it first in every process. A rank ends there; its launcher then ends too.
RECORD = """
import json, os, sys
from app.stack import memory
NAMES = os.environ["NAMES"].split()
memory.usable_cores = lambda: 16
with open(f"{os.environ['RECORDS']}/{os.environ.get('RANK', 'launcher')}.json", "w") as file:
    json.dump([os.environ.get(name) for name in NAMES], file)
if "RANK" in os.environ:
    os._exit(0)
"""
# A worker of one process, up to where Celery starts it.
ALONE = """
import os, sys
from workers import cli
def run_worker(*_):
    print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"), "torch" in sys.modules)
    sys.exit()
cli.run_worker = run_worker
cli.run_{kind}()
"""
# As ALONE, on 16 cores of which the container may use `QUOTA`.
LIMITED = """
import os, sys
from app.stack import memory
os.sched_getaffinity = lambda _: range(16)
memory.usable_cores = lambda: int(os.environ["QUOTA"])
from workers import cli
def run_worker(*_):
    print(os.environ.get("OMP_NUM_THREADS"), "torch" in sys.modules)
    sys.exit()
cli.run_worker = run_worker
cli.run_{kind}()
"""
# As ALONE, with twelve threads that allocate while all of them live; prints glibc's own description of its arenas.
THREADS = """
import ctypes, sys, threading
from workers import cli
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def run_worker(*_):
    all_alive = threading.Barrier(12)
    def allocate():
        all_alive.wait()
        libc.malloc(10_000)
        all_alive.wait()
    threads = [threading.Thread(target=allocate) for _ in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    output = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
    libc.malloc_info(0, output)
    libc.fclose(output)
    sys.exit()
cli.run_worker = run_worker
cli.run_{kind}()
"""
# As ALONE; then libgomp prints its settings as it is loaded.
LOADED = """
import sys
from workers import cli
def run_worker(*_):
    import torch
    sys.exit()
cli.run_worker = run_worker
cli.run_{kind}()
"""
# tests/conftest.py sets a policy for OpenMP.
UNBOUND = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("CUDA_", "OMP_", "GOMP_")) and name != "LOCAL_RANK"
}


def worker(folder: Path, command: list[str], toml: str, *options: str, **environ: str) -> str:
    """Runs the command as a worker of the base model "tiny" with these settings; returns its output."""
    settings = folder / "tinsmith.toml"
    settings.write_text(f'[[base_models]]\nname = "tiny"\npath = "org/tiny"\n{toml}')
    environ = {**UNBOUND, "TINSMITH_SETTINGS": str(settings), "TINSMITH_REDIS_URL": "redis://127.0.0.1:1", **environ}
    command = [sys.executable, *command, "--base", "tiny", "--name", "worker-0", *options]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
    return ran.stderr if "OMP_DISPLAY_ENV" in environ else ran.stdout


def test_launcher_and_ranks_see_the_named_gpus_in_their_order_and_a_rank_its_number(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORD)
    toml = "trainer = {ranks = 2, count = 2, devices = [0, 1, 5, 2]}"
    names = "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER LOCAL_RANK"
    assert recorded(tmp_path, names, toml, "--copy", "1") == {
        "launcher": ["5,2", "PCI_BUS_ID", None],
        "0": ["5,2", "PCI_BUS_ID", "0"],
        "1": ["5,2", "PCI_BUS_ID", "1"],
    }


def test_ranks_share_the_cores_unless_the_user_wants_another_number_of_threads(tmp_path: Path) -> None:
    """With GPUs, for offload: torchrun would give each rank one thread for all of its optimizer's work."""
    toml = "trainer = {ranks = 2, count = 2, devices = [0, 1, 2, 3]}"
    assert recorded(tmp_path, "OMP_NUM_THREADS", toml) == {"launcher": ["4"], "0": ["4"], "1": ["4"]}
    chosen = recorded(tmp_path, "OMP_NUM_THREADS", toml, OMP_NUM_THREADS="3")
    assert chosen == {"launcher": ["3"], "0": ["3"], "1": ["3"]}
    on_cpus = recorded(tmp_path, "OMP_NUM_THREADS", "trainer.ranks = 2")
    assert on_cpus == {"launcher": [None], "0": ["1"], "1": ["1"]}, "the bits of a CPU depend on the threads"


def test_ranks_in_a_container_whose_gpus_no_setting_names_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.gpu_start_locks, "visible", lambda environ: ["0000:01:00.0", "0000:02:00.0"])
    monkeypatch.setattr(cli, "usable_cores", lambda: 16)
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli._start_ranks(Settings(), TrainerSettings(ranks=2), "trainer-0", ())
    assert os.environ["OMP_NUM_THREADS"] == "8"


def recorded(folder: Path, names: str, toml: str, *options: str, **environ: str) -> dict[str, list[str | None]]:
    """The environment variables of these names in the launcher of two ranks and in the ranks, on 16 cores."""
    (folder / "sitecustomize.py").write_text(RECORD)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "RECORDS": str(folder), "NAMES": names, **environ}
    worker(folder, ["-m", "workers.trainer"], toml, *options, **environ)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("launcher", "0", "1")}


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_an_unknown_base_model_is_an_error_that_names_those_there_are(kind: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        worker(tmp_path, ["-m", f"workers.{kind}"], "", "--base", "small")
    assert "worker-0: the settings have no base model 'small'; they have: tiny" in failed.value.stderr


@pytest.mark.parametrize(
    ("kind", "toml", "options", "bound"),
    [
        ("trainer", "trainer.devices = [3]", [], "3 PCI_BUS_ID"),
        ("trainer", "full.devices = [7]", ["--full"], "7 PCI_BUS_ID"),
        ("trainer", "", [], "None None"),
        ("sampler", "sampler.devices = [6, 1]", [], "6,1 PCI_BUS_ID"),
        ("sampler", "full_sampler.devices = [4]", ["--full"], "4 PCI_BUS_ID"),
        ("sampler", "trainer.devices = [3]", [], "None None"),
        ("sampler", "sampler = {count = 3, devices = [2, 1, 0]}", ["--copy", "2"], "0 PCI_BUS_ID"),
        ("sampler", "full_sampler = {count = 2, devices = [[2], [7, 3]]}", ["--full", "--copy", "1"], "7,3 PCI_BUS_ID"),
        ("trainer", "full = {count = 2, devices = [5, 4]}", ["--full", "--copy", "1"], "4 PCI_BUS_ID"),
    ],
)
def test_a_worker_of_one_process_is_bound_before_it_imports_torch(
    kind: str, toml: str, options: list[str], bound: str, tmp_path: Path
) -> None:
    printed = worker(tmp_path, ["-c", ALONE.format(kind=kind)], toml, *options)
    assert printed.strip() == f"{bound} False"


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_threads_of_a_worker_share_a_few_arenas(kind: str, tmp_path: Path) -> None:
    """Each keeps what its threads once needed. Without a limit there is one for each thread, up to eight a core."""
    printed = worker(tmp_path, ["-c", THREADS.format(kind=kind)], "", MALLOC_ARENA_TEST="64")
    assert printed.count("<heap nr=") == 2


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_threads_of_a_loop_do_not_spin_for_long_unless_the_user_wants_it(kind: str, tmp_path: Path) -> None:
    """A trainer and a sampler that share cores would hold up each other."""

    def spins(**environ: str) -> int:
        shown = worker(tmp_path, ["-c", LOADED.format(kind=kind)], "", OMP_DISPLAY_ENV="VERBOSE", **environ)
        return int(re.findall(r"GOMP_SPINCOUNT = '([0-9]+)'", shown)[0])

    assert 0 < spins() < 10_000
    assert spins(GOMP_SPINCOUNT="77") == 77
    assert spins(OMP_WAIT_POLICY="active") > 10_000


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
@pytest.mark.parametrize(
    ("environ", "threads"),
    [({"QUOTA": "4"}, "4"), ({"QUOTA": "4", "OMP_NUM_THREADS": "6"}, "6"), ({"QUOTA": "16"}, None)],
)
def test_a_worker_of_one_process_has_the_threads_of_its_cpu_quota(
    kind: str, environ: dict[str, str], threads: str | None, tmp_path: Path
) -> None:
    assert limited(kind, tmp_path, "", **environ) == f"{threads} False"


def test_vllm_divides_its_threads_itself(tmp_path: Path) -> None:
    """It takes the variable for the operator's wish, and then all of its ranks have as many threads."""
    assert limited("sampler", tmp_path, 'sampler.backend = "vllm"', QUOTA="4") == "None False"
    gpus = "from workers.process import gpu_start_locks; gpu_start_locks.visible = lambda _: ['0000:01:00.0']"
    assert limited("sampler", tmp_path, "", gpus, QUOTA="4") == "None False"


def limited(kind: str, folder: Path, toml: str, first: str = "", **environ: str) -> str:
    """Runs the statement `first` and then LIMITED, as a worker of this kind; returns the output."""
    code = f"{first}\n{LIMITED.format(kind=kind)}"
    return worker(folder, ["-c", code], toml, CUDA_VISIBLE_DEVICES="", **environ).strip()


def test_flower_starts_without_the_libraries_that_compute() -> None:
    """It imports the tasks, and its extra has no torch. A worker imports more only once it knows its GPUs."""
    code = "import sys, workers.process.runtime; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
