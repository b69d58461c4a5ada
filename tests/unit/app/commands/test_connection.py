"""Commands reach the stack that runs on a data folder, by the settings that its processes have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.commands import connection
from app.settings import SETTINGS_VARIABLE
from app.stack.config import Options


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """The data folder of a stack with servers of its own."""
    (tmp_path / "run").mkdir()
    servers = '[redis]\nurl = "redis://own:1/0"\nbroker_url = "redis://own:1/1"\n'
    (tmp_path / "run" / "settings.toml").write_text(f'data_dir = "{tmp_path}"\n{servers}')
    return Options(data_dir=tmp_path)


def test_a_variable_of_the_shell_names_no_other_broker_than_the_stacks(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_BROKER_URL", "redis://other:1/1")
    assert connection.settings_of(options).broker_url == "redis://own:1/1"
    found = connection.environment(options)
    assert found[SETTINGS_VARIABLE] == str(options.data_dir / "run" / "settings.toml")
    assert found == {name: value for name, value in {**os.environ, **found}.items() if name != "TINSMITH_BROKER_URL"}
