from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.bench import __main__ as command
from ops.bench import api_body, fairness, machine, metrics, reads, report, side, timing
from ops.bench.report import Goal, Outcome

FAST = Outcome({"post_ms": {"p50": 1.23456}}, (Goal("post", 1.23456, "at_most", 2.0, "ms"),))
SLOW = Outcome({}, (Goal("ratio", 0.5, "at_least", 0.95, ""),))


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "sense", "met"),
    [(1.0, "at_most", True), (1.1, "at_most", False), (1.0, "at_least", True), (0.9, "at_least", False)],
)
def test_a_goal_is_met_up_to_its_limit(value: float, sense: str, met: bool):
    assert Goal("x", value, sense, 1.0, "").met is met


@pytest.mark.parametrize("sense", ["at_most", "at_least"])
def test_a_figure_that_could_not_be_measured_misses_its_goal(sense: str):
    assert not Goal("x", float("nan"), sense, 1.0, "").met


def test_a_run_leaves_one_file_a_bench_with_what_the_figures_depend_on(in_tmp: Path):
    assert command.main(["fast", "--out", "out"], {"fast": lambda _: FAST}) == 0
    (file,) = Path("out").iterdir()
    content = json.loads(file.read_text())
    assert file.name == "fast.json"
    assert content["figures"] == {"post_ms": {"p50": 1.235}}
    assert content["goals"] == [{"figure": "post", "value": 1.235, "at_most": 2.0, "unit": "ms", "met": True}]
    assert content["machine"].keys() >= {"cpu", "instructions", "cores", "memory_gib"}
    assert content["versions"].keys() >= {"python", "torch", "transformers", "deepspeed", "celery", "redis", "tinker"}
    assert content["command"] == "python -m ops.bench fast"
    assert content.keys() >= {"git_revision", "date", "met"}


def test_a_missed_goal_shows_in_the_table_and_the_exit_code(in_tmp: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["--out", "out"], {"fast": lambda _: FAST, "slow": lambda _: SLOW}) == 1
    where, _, fast, slow = capsys.readouterr().out.splitlines()
    assert fast.split() == ["fast", "post", "1.235", "ms", "<=", "2", "met"]
    assert slow.split() == ["slow", "ratio", "0.5", ">=", "0.95", "MISSED"]
    assert where == f"on {machine.kind()}"


@pytest.mark.parametrize(
    ("flags", "found"),
    [("fpu avx2 avx512f avx512_bf16 amx_bf16", "amx_bf16"), ("fpu avx avx2 bmi2", "avx2"), ("fp asimd bf16", "bf16")],
)
def test_a_machines_kind_names_the_instructions_that_decide_its_speed(flags: str, found: str):
    assert machine._instructions(flags) == found


def test_a_bench_that_fails_leaves_no_files(in_tmp: Path):
    def fail(folder: Path) -> Outcome:
        (folder / "left").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        command.main(["broken"], {"broken": fail})
    assert not [path for path in in_tmp.rglob("*") if path.is_file()]


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["real-step"])
    known = "api_start, api_body, overhead, pairs, real_step, merged, tenants, ragged, families, ddp, memory, recovery"
    assert f"unknown bench 'real-step'; the benches are {known}" in capsys.readouterr().err


@pytest.mark.parametrize("got, index", [([3, 3, 3], 1.0), ([6, 0, 0], 1 / 3), ([1, 3], 0.8), ([0, 0], 0.0)])
def test_jains_index_is_1_where_all_got_the_same_and_a_part_of_it_where_one_got_all(got: list[float], index: float):
    assert fairness.jain(got) == pytest.approx(index)


def test_sides_are_measured_in_turns():
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) or name.upper() for name in ("a", "b")}
    assert timing.alternate(2, sides) == {"a": ["A", "A"], "b": ["B", "B"]}
    assert calls == ["a", "b", "a", "b"]


def test_a_mean_counts_only_what_came_between_two_readings():
    key = frozenset({("kind", "optim_step")})
    before = {("s_sum", key): 5.0, ("s_count", key): 1.0}
    after = {("s_sum", key): 5.5, ("s_count", key): 11.0}
    assert metrics.mean_ms(before, after, "s", kind="optim_step") == pytest.approx(50.0)
    assert metrics.mean_ms({}, after, "s", kind="optim_step") == pytest.approx(500.0)


SIDE = """
import os, sys
from ops.bench import side

def prepare():
    print("noise of a library")
    if sys.argv[-1] == "broken":
        raise ValueError("no such model")
    return lambda count: [os.getpid()] * count

side.serve(prepare)
"""


def test_a_side_answers_from_a_process_that_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module(tmp_path, monkeypatch)
    with side.running("some_side", "-", tmp_path / "log") as bare:
        pid, _ = bare.measure(2)
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_side_that_dies_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="no such model"), side.running("some_side", "broken", tmp_path / "log"):
        pass


def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "some_side.py").write_text(SIDE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(Path.cwd()))))


def test_the_api_bench_measures_real_answers_and_leaves_no_process(tmp_path: Path):
    outcome = api_body.run(tmp_path, rows=4, rounds=2)
    assert outcome.figures["body_bytes"] > 4 * 1024 * 16
    assert outcome.figures["post_ms"]["count"] == 2
    assert set(outcome.figures["parts_ms"]) == {"parse", "decode", "check", "encode", "digest", "journal", "ring"}
    assert not left_in(tmp_path)


def test_the_reads_bench_counts_answers_beside_those_of_bare_flask_and_leaves_no_process(tmp_path: Path):
    outcome = reads.run(tmp_path, seconds=0.1, rounds=1)
    found = outcome.figures["reads"]
    assert {"bare GET", "bare POST", "get_info", "training runs", "checkpoints", "finished future"} <= found.keys()
    assert all(each["a_second"] > 0 for each in found.values())
    assert not left_in(tmp_path)


def test_a_bench_of_reads_too_short_for_a_processor_time_ends_and_misses_its_goal():
    figures = {"a_second": 1e6, "least_server_ms": 0.0}
    found = dict.fromkeys(("get_info", "bare POST", reads._WIDE), figures)
    assert [goal.met for goal in reads._goals(found)] == [False, True]


def test_an_answer_is_whole_with_the_last_byte_of_its_body_and_every_other_than_200_ends_the_bench():
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    assert [reads.is_whole(bytearray(whole[:end])) for end in range(1, len(whole) + 1)].index(True) == len(whole) - 1
    for other in (b"", b"HTTP/1.1 404 NOT FOUND\r\nContent-Length: 2\r\n\r\n{}"):
        with pytest.raises(RuntimeError):
            reads.is_whole(bytearray(other))


def test_a_killed_bench_takes_its_servers_along(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from ops.bench import api_body, servers\n"
        "with servers.prepared_api(Path(sys.argv[1]), api_body.INFO) as api, servers.running_api(api):\n"
        "    print('up', flush=True); sys.stdin.read()"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert bench.stdout is not None and bench.stdout.readline() == "up\n"
    assert len(processes_in(tmp_path)) == 3, "Valkey, gunicorn and its worker"
    bench.kill()
    bench.communicate()
    assert not left_in(tmp_path)


def left_in(folder: Path) -> list[str]:
    """Processes that still run after a while: a killed process takes a moment to end."""
    deadline = time.monotonic() + 120
    while processes_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes_in(folder)


def processes_in(folder: Path) -> list[str]:
    """Process ids of the servers whose log lies in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "fd" / "1").readlink().is_relative_to(folder):
                found.append(process.name)
    return found


def test_figures_are_written_to_four_digits_and_plain(tmp_path: Path):
    outcome = Outcome({"runs": [0.123456, 7], "unseen": float("nan"), "names": {"trainer": "deepspeed"}}, ())
    content = json.loads(report.write(tmp_path, "x", outcome, {}).read_text())
    assert content["figures"] == {"runs": [0.1235, 7], "unseen": None, "names": {"trainer": "deepspeed"}}
