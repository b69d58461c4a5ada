"""`tinsmith status` and `tinsmith top` show what the state server knows, in 80 columns, and steer no terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from app import ids
from app.domain.records import Model, Sampler, Worker
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease
from tests.unit.app.commands.test_admin import Command, tinsmith
from tests.unit.app.stack.test_terminal import HOSTILE

__all__ = ["tinsmith"]

BASE = "Qwen/Qwen3-0.6B"
RUN = ids.model_id("8e7b807b-6464-4143-b786-c55fc61da05a", 0)
DEADLINE_S = 120


def worker(records: RedisRecords, name: str, role: str, **fields: object) -> None:
    describe = {"devices": ["cuda:0"], "adapters": ["a", "b"] if role == "sampler" else []}
    record = Worker(role, BASE, {}, describe, "http://127.0.0.1:9100/metrics", records.now() - 7200, pace_s=0.25)
    records.put(Worker.namespace, name, {**dump(record), **{key: json.dumps(value) for key, value in fields.items()}})


def run(records: RedisRecords, model_id: str = RUN, **fields: str) -> None:
    lora = {"rank": 32}
    record = Model("project-1", model_id.partition(":")[0], BASE, records.now(), "ready", lora)
    records.put(Model.namespace, model_id, {**dump(record), **fields})


@pytest.fixture
def records(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client)


@pytest.fixture
def shown(tinsmith: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def lines(*arguments: str, columns: int = 80) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        return tinsmith("status", *arguments).splitlines()

    return lines


@pytest.mark.parametrize("columns", [80, 120])
def test_a_worker_and_a_run_are_a_line_each_with_the_whole_id(
    columns: int, records: RedisRecords, client: redis.Redis, shown: Callable[..., list[str]]
) -> None:
    worker(records, "trainer-0@host", "trainer")
    worker(records, "sampler-0@host", "sampler", healthy=False)
    run(records, applied="41", last_request=str(int(1000 * (records.now() - 300))))
    client.set(keys.lease(RUN), "trainer-0@host/1f")
    lines = shown(columns=columns)
    assert max(map(len, lines)) <= columns and "\x1b" not in "".join(lines)
    [trainer] = [line.split() for line in lines if line.startswith("trainer-0")]
    assert trainer == ["trainer-0", "healthy", "1", "0.25", "2h", "cuda:0", BASE]
    [sampler] = [line.split() for line in lines if line.startswith("sampler-0")]
    assert sampler[:3] == ["sampler-0", "stalled", "2"]
    assert "metrics: sampler-0 127.0.0.1:9100, trainer-0 127.0.0.1:9100" in lines
    [found] = [line.split() for line in lines if line.startswith(RUN)]
    assert found == [RUN, "LoRA", "32", "42", "0", "trainer-0", "5m"]


def trained(client: redis.Redis, records: RedisRecords, now: float) -> None:
    """Two steps of two calls each, the newest now."""
    run(records, steps="2", trained_tokens="4000")
    for seq in range(1, 5):
        kind = "optim_step" if seq % 2 == 0 else "forward_backward"
        metrics = {"grad_norm": 1.0} if seq % 2 == 0 else {"loss:sum": 3000.0 / seq}
        point = {"metrics": metrics, "tokens": 2000 * (seq % 2), "weight": 1000.0 * (seq % 2), "seconds": 0.5}
        fields = {"seq": str(seq), "kind": kind, "point": json.dumps(point)}
        client.xadd(keys.progress(RUN), cast(Any, fields), id=f"{int(1000 * now) + 2000 * (seq - 4)}-0")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_run_that_trains_has_its_step_loss_and_rate(
    columns: int, records: RedisRecords, client: redis.Redis, shown: Callable[..., list[str]]
) -> None:
    trained(client, records, records.now())
    lines = shown(columns=columns)
    assert max(map(len, lines)) <= columns and "\x1b" not in "".join(lines)
    at = next(at for at, line in enumerate(lines) if line.startswith(RUN))
    assert lines[at + 1].strip() == "step 2, loss 1, 615 tokens/s"


def test_a_run_that_pauses_has_no_rate(
    records: RedisRecords, client: redis.Redis, shown: Callable[..., list[str]]
) -> None:
    trained(client, records, records.now() - 3600)
    assert "  step 2, loss 1" in [line.rstrip() for line in shown()]
    [found] = json.loads("\n".join(shown("--json")))["runs"]
    assert [found[name] for name in ("steps", "trained_tokens", "loss", "tokens_per_s")] == [2, 4000, 1.0, None]


def test_json_has_the_same_facts(records: RedisRecords, client: redis.Redis, shown: Callable[..., list[str]]) -> None:
    worker(records, "trainer-0@host", "trainer")
    run(records, applied="41", snapshot="", snapshot_seq="-1")
    oplog = RedisOpLog(client, EngineSettings(lease_s=3600))
    for seq in (42, 43):
        oplog.admit(RUN, seq, "forward", b"", f"digest {seq}")
    lease = oplog.acquire(RUN, "trainer-0@host/1f")
    assert isinstance(lease, Lease) and oplog.next(lease, 42)
    sampler = ids.sampling_session_id(RUN.partition(":")[0], 0)
    records.put(Sampler.namespace, sampler, dump(Sampler("project-1", RUN.partition(":")[0], BASE, 0.0)))
    oplog.admit_sample(f"{sampler}:0", sampler, "project-1", f"sample.{BASE}", b"", "digest")
    found = json.loads("\n".join(shown("--json")))
    assert [one["name"] for one in found["workers"]] == ["trainer-0@host"]
    assert found["workers"][0]["metrics_url"] == "http://127.0.0.1:9100/metrics"
    [found_run] = found["runs"]
    assert [found_run[name] for name in ("id", "calls", "waiting", "running")] == [RUN, 42, 2, True]
    assert (found_run["worker"], found["samples"]) == ("trainer-0@host", {BASE: 1})
    assert found["memory_bytes"] > 0 and found["more_runs"] == 0
    lines = shown()
    assert f"{BASE}: 1 unfinished samples" in lines
    [cells] = [line.split() for line in lines if line.startswith(RUN)]
    assert cells[:-1] == [RUN, "LoRA", "32", "42", "2", "trainer-0", "*"]


def test_each_run_has_its_own_worker_also_between_runs_that_have_ended(
    records: RedisRecords, client: redis.Redis, shown: Callable[..., list[str]]
) -> None:
    held = {ids.model_id(RUN.partition(":")[0], number): f"trainer-{number}@host" for number in range(5)}
    first, *middle, last = held
    for model_id, node in held.items():
        run(records, model_id, **({"ended": "1"} if model_id in (first, last) else {}))
        client.set(keys.lease(model_id), f"{node}/1")
    found = json.loads("\n".join(shown("--json")))["runs"]
    assert {one["id"]: one["worker"] for one in found} == {model_id: held[model_id] for model_id in middle}


def test_the_runs_with_the_newest_calls_come_first_and_ended_ones_not_at_all(
    records: RedisRecords, shown: Callable[..., list[str]]
) -> None:
    named = [ids.model_id("8e7b807b-6464-4143-b786-c55fc61da05a", number) for number in range(4)]
    for age, model_id in enumerate(named):
        run(records, model_id, last_request=str(int(1000 * (records.now() - age))))
    records.update(Model.namespace, named[0], {"ended": "deleted"})
    lines = shown("--runs", "2")
    assert [line.split()[0] for line in lines if line.startswith("8e7b807b")] == named[1:3]
    assert "and 1 other runs; --runs N shows more" in lines


def test_names_steer_no_terminal(records: RedisRecords, shown: Callable[..., list[str]]) -> None:
    run(records, base_model=json.dumps(HOSTILE), applied="1")
    worker(records, "trainer-0@host", "trainer", base_model=HOSTILE)
    lines = shown(columns=200)
    assert all(line.isprintable() for line in lines) and "".join(lines).count("owned") == 2


def test_top_shows_new_calls_until_it_is_interrupted(records: RedisRecords, valkey: str, tmp_path: Path) -> None:
    run(records, applied="0")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "app.cli", "top", "--redis", valkey, "--data-dir", str(tmp_path)]
    environ = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    os.close(slave)
    try:
        seen = _until(master, b"LoRA 32 1 ")
        records.update(Model.namespace, RUN, {"applied": "776"})
        seen += _until(master, b"LoRA 32 777 ")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert RUN.encode() in seen
    finally:
        process.kill()
        os.close(master)


def _until(terminal: int, wanted: bytes) -> bytes:
    """Reads the terminal until it has shown `wanted`."""
    seen, deadline = b"", time.monotonic() + DEADLINE_S
    while wanted not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        seen += os.read(terminal, 65_536)
    return seen
