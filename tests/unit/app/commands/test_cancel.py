"""`tinsmith cancel` ends the runs and samples of one session or project and of no other, once somebody has said yes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from app import cli, ids
from app.domain.records import Checkpoint, Model, Sampler, Session
from app.domain.results import Result
from app.errors import Fenced, Gone
from app.services.tenants.authentication import project_of
from app.settings import EngineSettings, hash_key
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease

Command = Callable[..., tuple[int, str, str]]
MINE, OTHERS = "8e7b807b-6464-4143-b786-c55fc61da05a", "11111111-6464-4143-b786-c55fc61da05a"
RUN, OTHER_RUN = ids.model_id(MINE, 0), ids.model_id(OTHERS, 0)
SAVED = f"tinker://{RUN}/weights/kept"


@pytest.fixture
def tinsmith(valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command; returns its exit code and what it says on stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["cancel", *arguments, "--data-dir", str(tmp_path), "--redis", valkey])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    """Two projects with a session each, which has a run with two waiting calls and a sampler with a waiting sample."""
    log, records = RedisOpLog(client, EngineSettings()), RedisRecords(client)
    for session, project in ((MINE, "mine"), (OTHERS, "others")):
        run, sampler = ids.model_id(session, 0), ids.sampling_session_id(session, 0)
        records.put_new(Session.namespace, session, dump(Session(project, 0.0)))
        log.create_model(run, dump(Model(project, session, "base", 0.0)))
        for seq in range(2):
            log.admit(run, seq, "forward_backward", b"", f"digest {seq}")
        records.put_new(Sampler.namespace, sampler, dump(Sampler(project, session, "base", 0.0)))
        log.admit_sample(ids.request_id(sampler, 0), sampler, project, "sample.base", b"", "digest")
    records.put(Checkpoint.namespace, SAVED, dump(Checkpoint("mine", RUN, "weights", "base", "p", 0.0, 7, {}, [])))
    return log


def answers(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)


def calls(session: str) -> list[str]:
    sampler = ids.sampling_session_id(session, 0)
    return [*(ids.request_id(ids.model_id(session, 0), seq) for seq in range(2)), ids.request_id(sampler, 0)]


@pytest.mark.parametrize("target", [MINE, "mine"])
def test_its_calls_fail_and_its_checkpoints_and_everybody_elses_calls_stay(
    target: str, oplog: RedisOpLog, client: redis.Redis, tinsmith: Command
) -> None:
    code, out, err = tinsmith(target, "--yes")
    ended = f"ended 1 run and 1 session of {target}; 2 waiting calls and 1 sample failed; checkpoints stay\n"
    assert (code, out, err) == (0, ended, "")
    for request_id in calls(MINE):
        future = oplog.future(request_id, {"mine"})
        assert future.state == "failed" and future.result is not None
        assert json.loads(future.result.body)["category"] == "user"
    assert [oplog.future(request_id, {"others"}).state for request_id in calls(OTHERS)] == ["pending"] * 3
    assert RedisRecords(client).find(Checkpoint, SAVED) is not None
    session = RedisRecords(client).find(Session, MINE)
    assert session is not None and session.status == "interrupted"
    with pytest.raises(Gone, match="this run has ended: it was deleted"):
        oplog.admit(RUN, 2, "optim_step", b"", "d")


def test_a_call_that_runs_meanwhile_is_not_committed(oplog: RedisOpLog, tinsmith: Command) -> None:
    lease = oplog.acquire(RUN, "trainer-0@host/1f")
    assert isinstance(lease, Lease) and oplog.next(lease, 0) is not None
    assert tinsmith(MINE, "--yes")[0] == 0
    with pytest.raises(Fenced):
        oplog.commit(lease, 0, Result(b"{}"))
    assert oplog.future(calls(MINE)[0], {"mine"}).state == "failed"


def test_a_call_that_was_done_before_keeps_its_result(oplog: RedisOpLog, tinsmith: Command) -> None:
    lease = oplog.acquire(RUN, "trainer-0@host/1f")
    assert isinstance(lease, Lease)
    oplog.commit(lease, 0, Result(b"done"))
    assert "1 waiting call and" in tinsmith(MINE, "--yes")[1]
    future = oplog.future(calls(MINE)[0], {"mine"})
    assert future.result is not None and (future.state, future.result.body) == ("done", b"done")


def test_a_repeat_finds_nothing(oplog: RedisOpLog, tinsmith: Command) -> None:
    assert tinsmith(MINE, "--yes")[0] == 0
    assert tinsmith(MINE) == (0, f"there is nothing to end in {MINE}\n", "")


def test_a_session_that_was_used_again_is_ended_again_and_its_samples_alone_count(
    oplog: RedisOpLog, client: redis.Redis, tinsmith: Command
) -> None:
    """It keeps the status of its first end."""
    assert tinsmith("mine", "--yes")[0] == 0
    ended, records = "22222222-6464-4143-b786-c55fc61da05a", RedisRecords(client)
    records.put_new(Session.namespace, ended, dump(Session("mine", 0.0, status="success")))
    for session, seq in ((MINE, 1), (ended, 0)):
        sampler = ids.sampling_session_id(session, 0)
        records.put_new(Sampler.namespace, sampler, dump(Sampler("mine", session, "base", 0.0)))
        oplog.admit_sample(ids.request_id(sampler, seq), sampler, "mine", "sample.base", b"", "digest")
    client.zrem(keys.SESSIONS_HEARD, ended)
    code, out, _ = tinsmith("mine", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"runs": [], "sessions": [MINE], "calls": 0, "samples": 1})
    again = ids.request_id(ids.sampling_session_id(MINE, 0), 1)
    assert oplog.future(again, {"mine"}).state == "failed"
    assert tinsmith("mine") == (0, "there is nothing to end in mine\n", "")


def test_an_expired_session_is_ended_too_so_that_its_client_cannot_reopen_it(
    oplog: RedisOpLog, client: redis.Redis, tinsmith: Command
) -> None:
    records = RedisRecords(client)
    records.update(Session.namespace, MINE, {"status": '"expired"'})
    client.zrem(keys.SESSIONS_HEARD, MINE)
    assert json.loads(tinsmith(MINE, "--yes", "--json")[1])["sessions"] == [MINE]
    session = records.find(Session, MINE)
    assert session is not None and session.status == "interrupted"


def test_json_names_what_was_ended(oplog: RedisOpLog, tinsmith: Command) -> None:
    code, out, _ = tinsmith("mine", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"runs": [RUN], "sessions": [MINE], "calls": 2, "samples": 1})


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "no\n", "yess\n"])
def test_it_asks_before_and_no_ends_nothing(
    answer: str, oplog: RedisOpLog, tinsmith: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, answer)
    code, out, err = tinsmith("mine")
    assert (code, out) == (1, "")
    assert err == (
        "End 1 run and 1 session of mine? 2 waiting calls and 1 sample will fail; checkpoints stay. [y/N] "
        "tinsmith: nothing was ended\n"
    )
    assert [oplog.future(request_id, {"mine"}).state for request_id in calls(MINE)] == ["pending"] * 3


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_yes_ends_it(answer: str, oplog: RedisOpLog, tinsmith: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, answer)
    assert tinsmith("mine")[0] == 0
    assert oplog.future(calls(MINE)[0], {"mine"}).state == "failed"


def test_without_a_terminal_nobody_can_be_asked(
    oplog: RedisOpLog, tinsmith: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = tinsmith("mine")
    assert (code, err) == (
        2,
        "tinsmith: cannot ask for confirmation, because the input is not a terminal: add --yes to go on without it\n",
    )
    assert oplog.future(calls(MINE)[0], {"mine"}).state == "pending"


def test_an_unknown_id_is_one_sentence_and_exit_code_1(oplog: RedisOpLog, tinsmith: Command) -> None:
    code, out, err = tinsmith("nobody", "--yes")
    assert (code, out) == (1, "")
    assert err == "tinsmith: there is no session or project 'nobody'; `tinsmith status --json` lists the runs\n"


def test_a_project_without_sessions_has_nothing_to_end(
    client: redis.Redis, tinsmith: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hash_key("tml-0123456789")
    (tmp_path / "keys.toml").write_text(f'api_keys = ["{digest}"]\n')
    monkeypatch.setenv("TINSMITH_SETTINGS", str(tmp_path / "keys.toml"))
    project = project_of(digest)
    assert tinsmith(project) == (0, f"there is nothing to end in {project}\n", "")


def test_the_audit_log_has_each_run_that_was_ended(oplog: RedisOpLog, tinsmith: Command, client: redis.Redis) -> None:
    assert tinsmith("mine", "--yes")[0] == 0
    entries = [entry for page in client.scan_iter("tinsmith:page:audit/mine/*") for entry in client.hvals(page)]
    assert len(entries) == 1 and b"run_delete" in entries[0] and RUN.encode() in entries[0]


def test_a_copy_of_a_checkpoint_is_no_run_and_stays(oplog: RedisOpLog, tinsmith: Command, client: redis.Redis) -> None:
    records, copy = RedisRecords(client), ids.model_id(MINE, 1)
    records.put(Model.namespace, copy, dump(Model("mine", MINE, "base", 0.0, copied_from=SAVED)))
    assert json.loads(tinsmith(MINE, "--yes", "--json")[1])["runs"] == [RUN]
    assert "ended" not in (records.get(Model.namespace, copy) or {"ended": ""})
