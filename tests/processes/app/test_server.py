"""The HTTP server of `tinsmith up`, without a state server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.settings import SETTINGS_VARIABLE


def test_the_server_loads_no_file_of_the_current_folder_in_the_place_of_a_module(tmp_path: Path) -> None:
    for name in ("app", "pydantic"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    (tmp_path / "settings.toml").write_text("")
    server = [sys.executable, "-m", "app.server", "-c", "python:app.gunicorn_conf", "--check-config"]
    checked = subprocess.run(
        [*server, "app.errors:TinsmithError"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1", SETTINGS_VARIABLE: "settings.toml"},
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
