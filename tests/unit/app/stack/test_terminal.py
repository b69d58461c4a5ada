"""Tests of the commands' output: what a terminal would obey is printed as an escape, wherever it comes from."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest
import redis

from app import cli
from app.commands import recovery
from app.demo import report
from app.domain.accounts import Key, Organisation, Project, User
from app.errors import TinsmithError
from app.services.recovery.rebuild import Restored
from app.stack import terminal
from app.stores.redis.records import RedisRecords
from tests.pages import in_mid_hour
from tests.unit.app.commands.test_admin import Command, made, tinsmith

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x00\u202eltr\u2066\u200b\u2028\nforged\tline"
__all__ = ["tinsmith"]


def test_what_a_terminal_would_obey_is_shown_as_an_escape() -> None:
    assert terminal.visible(HOSTILE).isprintable()
    assert terminal.visible("\x1b[2J\u202e\ud800\n") == r"\x1b[2J\u202e\ud800\n"
    assert terminal.visible("a\tb\nc", "\t") == "a\tb\\nc"


def test_what_is_just_shown_stays() -> None:
    for text in ("Łódź 茶 🫖 עברית ñ", "C:\\x1b", ""):
        assert terminal.visible(text) == text


def test_a_warning_to_a_terminal_that_hung_up_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack in the background outlives its terminal."""
    master, terminals_end = os.openpty()
    os.close(master)
    with io.TextIOWrapper(io.FileIO(terminals_end, "w"), write_through=True) as hung_up:
        with pytest.raises(OSError, match="Input/output error"):
            print("a line", file=hung_up)
        monkeypatch.setattr(sys, "stderr", hung_up)
        terminal.warn("a warning")


def test_no_cell_begins_another_one() -> None:
    assert terminal.row("a", "b\tc", "d\ne").split("\t") == ["a", r"b\tc", r"d\ne"]


def test_names_of_accounts_steer_no_terminal(tinsmith: Command, client: redis.Redis) -> None:
    made(tinsmith)
    records = RedisRecords(client)
    for cls, field in ((Organisation, "name"), (Project, "name"), (User, "email"), (Key, "name")):
        for id_, fields in list(records.list(cls.namespace)):
            records.put(cls.namespace, id_, {**fields, field: json.dumps(HOSTILE)})
    for kind in ("org", "project", "user", "key"):
        text = tinsmith("admin", kind, "list")
        assert len(text.splitlines()) == 2
        assert all(line.replace("\t", "").isprintable() for line in text.splitlines()) and "owned" in text


def test_an_audit_log_steers_no_terminal(tinsmith: Command, client: redis.Redis) -> None:
    in_mid_hour()
    records = RedisRecords(client)
    records.note(
        "audit", "project-1", "key", json.dumps({"event": f"run_{HOSTILE}", "event_details": {"path": HOSTILE}})
    )
    (line,) = tinsmith("admin", "audit", "project-1").splitlines()
    assert line.replace("\t", "").isprintable() and line.count("\t") == 2


def test_what_a_hostile_store_names_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    restored = Restored()
    restored.runs[f"run{HOSTILE}"] = 1
    restored.damaged.append(f"checkpoints/{HOSTILE}")
    terminal.show(*recovery.report(restored, 0, 0))
    said = capsys.readouterr().out
    assert all(line.replace("\t", "").isprintable() for line in said.splitlines()) and said.count("owned") == 2


def test_an_error_steers_no_terminal_and_keeps_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise TinsmithError("worker ended; the end of its log:\n  \x1b[31mred")

    monkeypatch.setattr(recovery, "rebuild", fail)
    assert cli.main(["rebuild"]) == 1
    assert capsys.readouterr().err == "tinsmith: worker ended; the end of its log:\n  \\x1b[31mred\n"


def test_answers_of_the_demos_model_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_answers(["\x1b[2J"] * 3, ["\u202ebackwards"] * 3)
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
