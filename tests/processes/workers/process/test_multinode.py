from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import psutil
import pytest

from app.errors import SetupError
from app.settings import Settings
from tests.hosts import FIRST, SECOND, install_ssh
from workers.process import multinode, orderly_stop

# Writes its process id to a file for the test. The rank that the argument names fails once the other has written too.
PROGRAM = """
import os, sys, time
rank, folder, end = os.environ["RANK"], sys.argv[1], sys.argv[2]
open(f"{folder}/{rank}.part", "w").write(str(os.getpid()))
os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")
while end != rank or not os.path.exists(f"{folder}/{1 - int(rank)}"):
    time.sleep(0.1)
sys.exit(7)
"""

# A rank that works on for a while after a SIGTERM, as rank 0 does, and then gives its Op back.
BUSY = """
import os, signal, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
if rank == "0":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
open(f"{folder}/{rank}", "w").write(str(os.getpid()))
if rank == "0":
    signal.sigwait({signal.SIGTERM})
    open(f"{folder}/asked", "w").close()
    time.sleep(%s)
    open(f"{folder}/given back", "w").close()
while not os.path.exists(f"{folder}/0"):
    time.sleep(0.1)
sys.exit(7)
"""

# Writes what the rank is bound to.
BOUND = """
import os, sys
names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "CUDA_DEVICE_ORDER", "TINSMITH_METRICS_PORT")
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(" ".join(os.environ[name] for name in names))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    install_ssh(tmp_path / "bin", monkeypatch)
    return "program"


def test_when_a_rank_fails_the_others_end_and_its_code_is_the_groups(tmp_path: Path, module: str) -> None:
    code = multinode.run({FIRST: 1, SECOND: 1}, Settings(data_dir=tmp_path), "group", [module, str(tmp_path), "1"])
    assert code == 7
    assert not any(psutil.pid_exists(int((tmp_path / rank).read_text())) for rank in ("0", "1"))


def test_the_death_of_a_rank_on_another_host_is_an_attempt_of_the_op_that_runs(tmp_path: Path, module: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY % (4 * orderly_stop._WITHIN_S))
    code = multinode.run({FIRST: 1, SECOND: 1}, Settings(data_dir=tmp_path), "group", ["busy", str(tmp_path)])
    assert code == 7
    assert (tmp_path / "asked").exists(), "it had time to end by itself"
    assert not (tmp_path / "given back").exists()
    assert not psutil.pid_exists(int((tmp_path / "0").read_text()))


def test_a_node_gives_all_of_its_ranks_together_the_time_to_end(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text("import signal; signal.signal(15, signal.SIG_IGN)\n" + PROGRAM)
    monkeypatch.setattr(multinode, "RANKS_S", 0.1)
    orders = next(multinode._orders({FIRST: 2}, Settings(data_dir=tmp_path), ["stubborn", str(tmp_path), "none"], ()))
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as threads:
        code = threads.submit(multinode._launch, orders["launch"], {}, FileIO(read))
        pids = [await_pid(tmp_path / rank) for rank in ("0", "1")]
        os.close(write)
        try:
            assert code.result() == -signal.SIGKILL, "it did not wait for the launcher, which waits for each"
        finally:
            for pid in filter(psutil.pid_exists, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("devices", "bound"), [((5, 2, 4), {"0": "5,2 0", "1": "5,2 1", "2": "5 0"}), ((), {"0": "0,1 0", "2": "0 0"})]
)
def test_the_ranks_of_a_host_see_as_many_of_the_named_gpus_as_it_has_slots_and_their_copys_port(
    devices: tuple[int, ...], bound: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bound.py").write_text(BOUND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("TINSMITH_METRICS_PORT", "9101")  # each copy of a trainer has its own
    install_ssh(tmp_path / "bin", monkeypatch)
    command = ["bound", str(tmp_path)]
    assert multinode.run({FIRST: 2, SECOND: 1}, Settings(data_dir=tmp_path), "group", command, devices) == 0
    assert {rank: (tmp_path / rank).read_text() for rank in bound} == {
        rank: f"{text} PCI_BUS_ID 9101" for rank, text in bound.items()
    }


def test_a_host_with_more_slots_than_gpus_are_named_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"trainer\.devices is \[5\], but the hostfile gives 127\.0\.0\.3 2 slots"):
        multinode.run({FIRST: 1, SECOND: 2}, Settings(data_dir=tmp_path), "group", ["bound"], (5,))


def test_two_groups_of_one_name_that_share_a_data_folder_run_beside_each_other(tmp_path: Path, module: str) -> None:
    """The chart gives every trainer of every base model the name `trainer`."""
    settings = Settings(data_dir=tmp_path)
    with multinode._witness(settings, "trainer") as first, multinode._witness(settings, "trainer") as second:
        assert multinode._shares_data(first) and multinode._shares_data(second)
        assert f"trainer-{os.uname().nodename}-" in first["path"], "an operator sees whose file it is"
    assert list((tmp_path / "run").iterdir()) == []


def test_a_node_whose_starter_is_killed_ends_its_ranks(tmp_path: Path, module: str) -> None:
    start = (
        "from pathlib import Path; from app.settings import Settings; from workers.process import multinode;"
        f"multinode.run({{{FIRST!r}: 1, {SECOND!r}: 1}}, Settings(data_dir=Path({str(tmp_path)!r})), 'group',"
        f" ['program', {str(tmp_path)!r}, 'none'])"
    )
    with subprocess.Popen([sys.executable, "-c", start]) as starter:
        pids = [await_pid(tmp_path / rank) for rank in ("0", "1")]
        starter.kill()
    deadline = time.monotonic() + 240
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def await_pid(path: Path) -> int:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return int(path.read_text())


def test_a_host_that_does_not_share_the_data_folder_is_a_setup_error(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text: read(path, "another's"))
    code = multinode.run({FIRST: 1}, Settings(data_dir=tmp_path), "group", [module, str(tmp_path), "none"])
    said = capfd.readouterr().err
    assert code == 2
    assert said.startswith("group: ")
    assert f"does not see the data folder {tmp_path}" in said


def test_a_node_imports_from_where_the_trainer_does_and_not_from_the_current_folder(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short.py").write_text("raise SystemExit(7)")
    user = tmp_path / "of the user"
    user.mkdir()
    (user / "workers.py").write_text("raise SystemExit(9)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(multinode.__file__).parents[2]))))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.chdir(user)
    assert multinode.run({FIRST: 1}, Settings(data_dir=tmp_path), "group", ["short"]) == 7
