"""The jobs of the extras, with a stand-in for an environment's Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_hour import jobs
from tests.first_hour.environment import Environment, InstallError


def test_a_stack_that_says_nothing_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "_PATIENCE_S", 0.5)
    environment = Environment(tmp_path)
    python = Path(environment.python)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no model yet >&2\nexec sleep 600\n")
    python.chmod(0o755)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(InstallError, match="`tinsmith up` ended with -15: "):
        jobs.train_and_sample(environment)
