from __future__ import annotations

import sys

import pytest

from app.stack import child as stack_child
from app.stack.child import Child, Command


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
