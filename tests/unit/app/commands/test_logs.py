"""`tinsmith logs` shows what the state server and the log files know of one call, and steers no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from app import cli, ids
from app.domain.records import Model
from app.domain.results import PROTOBUF, Result
from app.errors import UserOpError
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from app.wire.results import of_error
from tests.unit.app.commands.test_admin import Command, tinsmith
from tests.unit.app.stack.test_terminal import HOSTILE

__all__ = ["tinsmith"]

BASE = "Qwen/Qwen3-0.6B"
RUN = ids.model_id("8e7b807b-6464-4143-b786-c55fc61da05a", 0)
FIRST = ids.request_id(RUN, 0)


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    log = RedisOpLog(client, EngineSettings())
    log.create_model(RUN, dump(Model("project-1", RUN.partition(":")[0], BASE, 0.0)))
    log.admit(RUN, 0, "forward_backward", b"", "d")
    return log


@pytest.fixture
def shown(tinsmith: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def lines(*arguments: str, columns: int = 80) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        return tinsmith("logs", *arguments).splitlines()

    return lines


def fact(lines: list[str], name: str) -> str:
    [found] = [line for line in lines if line.startswith(f"{name} ")]
    return found.removeprefix(name).strip()


def leased(oplog: RedisOpLog) -> Lease:
    lease = oplog.acquire(RUN, "trainer-0@host/1f")
    assert isinstance(lease, Lease)
    oplog.next(lease, 0)
    return lease


def log(tmp_path: Path, name: str, *lines: dict[str, Any] | str) -> None:
    (tmp_path / "logs").mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "logs" / name).write_text("".join(f"{text}\n" for text in texts))


def said(message: str, request_id: str = FIRST, **fields: Any) -> dict[str, Any]:
    head = {"time": "2026-11-26T13:05:51.123+00:00", "level": "INFO", "logger": "tinsmith.ops", "message": message}
    return head | {"request_id": request_id, "model_id": RUN, "seq": 0} | fields


@pytest.mark.parametrize("columns", [80, 120])
def test_a_call_that_failed_has_its_error_its_category_and_its_times(
    columns: int, oplog: RedisOpLog, shown: Callable[..., list[str]], tmp_path: Path
) -> None:
    error = UserOpError("the loss of datum 3 is not finite: " + "look at its weights; " * 9)
    oplog.commit(leased(oplog), 0, of_error(error), (), "infinite")
    log(tmp_path, "trainer-0.log", said("forward_backward failed", waited_s=0.5, run_s=1.25, commit_s=0.001))
    lines = shown(FIRST, columns=columns)
    assert max(map(len, lines)) <= columns and "\x1b" not in "".join(lines)
    assert [fact(lines, name) for name in ("call", "kind", "run", "project")] == [
        FIRST,
        "forward_backward",
        RUN,
        "project-1",
    ]
    assert fact(lines, "base model") == BASE and fact(lines, "state") == "failed (user)"
    assert "the loss of datum 3 is not finite" in fact(lines, "error")
    assert fact(lines, "stages") == "waited 0.500 s, run 1.250 s, commit 0.001 s"
    assert fact(lines, "attempts") == "0 workers died while they ran it" and fact(lines, "worker") == "trainer-0@host"
    assert fact(lines, "admitted")[:2] == fact(lines, "ended")[:2] == "20"


def test_a_call_waits_runs_and_is_done(oplog: RedisOpLog, shown: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = shown(FIRST)
    assert fact(lines, "state") == "waiting" and "ended" not in " ".join(lines)
    assert f"no line in {tmp_path / 'logs'} names it".replace(" ", "") in "".join(lines[-3:]).replace(" ", "")
    lease = leased(oplog)
    assert fact(shown(FIRST), "state") == "running"
    oplog.commit(lease, 0, Result(b"\x99 is no text", PROTOBUF))
    assert fact(shown(FIRST), "state") == "done"


def test_a_refused_call_has_the_reason(oplog: RedisOpLog, shown: Callable[..., list[str]]) -> None:
    oplog.refuse(RUN, 1, "datum 0 is too long", "lost_batch")
    lines = shown(ids.request_id(RUN, 1))
    assert (fact(lines, "state"), fact(lines, "error")) == ("refused (user)", "datum 0 is too long")


def test_the_lines_that_name_it_are_shown_in_order_and_no_others(
    oplog: RedisOpLog, shown: Callable[..., list[str]], tmp_path: Path
) -> None:
    later = "2026-11-26T13:05:52.000+00:00"
    log(tmp_path, "trainer-0.log", said("forward_backward done", time=later), said("not it", ids.request_id(RUN, 1)))
    log(tmp_path, "api.log", said("admitted forward_backward"), said("nor this", f"{RUN}:01"), said("nor", FIRST + "1"))
    log(tmp_path, "api.log.1", f"{FIRST} broke the backend", "in no form")
    found = json.loads("\n".join(shown(FIRST, "--json")))
    assert [(line["process"], line["message"]) for line in found["lines"]] == [
        ("api", f"{FIRST} broke the backend"),
        ("api", "admitted forward_backward"),
        ("trainer-0", "forward_backward done"),
    ]
    assert found["state"] == "waiting" and found["base_model"] == BASE and found["ended"] is None


def test_of_a_call_that_has_expired_the_lines_are_left(shown: Callable[..., list[str]], tmp_path: Path) -> None:
    log(tmp_path, "trainer-0.log", said("forward_backward done", traceback="Traceback:\n  ValueError"))
    lines = shown(FIRST)
    assert fact(lines, "state") == "expired"
    assert lines[-3:] == ["  forward_backward done", "  Traceback:", "    ValueError"]


@pytest.mark.parametrize("text", ["", "7", RUN, RUN.partition(":")[0], "\udcff", f"{RUN}:x"])
def test_what_is_no_id_of_a_call_matches_nothing(
    text: str, oplog: RedisOpLog, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", text, "--data-dir", str(tmp_path), "--redis", valkey]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "is not the id of a call" in err and err.count("\n") == 1


def test_an_unknown_call_is_one_sentence_and_exit_code_1(
    oplog: RedisOpLog, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", f"{RUN}:77", "--data-dir", str(tmp_path), "--redis", valkey]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"tinsmith: there is no call '{RUN}:77': ") and err.count("\n") == 1


def test_logs_steer_no_terminal(oplog: RedisOpLog, shown: Callable[..., list[str]], tmp_path: Path) -> None:
    log(tmp_path, "trainer-0.log", said(HOSTILE, traceback=HOSTILE), f"{FIRST} {HOSTILE}".replace("\n", " "))
    oplog.commit(leased(oplog), 0, of_error(UserOpError(HOSTILE)), (), "why")
    assert all(line.isprintable() for line in shown(FIRST, columns=200))
