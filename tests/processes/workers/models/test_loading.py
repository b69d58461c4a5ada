from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.http_server import Handler, serving
from tests.hub_of_models import hub_of_models
from tests.models import tiny_qwen3


class Hub(Handler):
    """Refuses every file of a model in the same way as the hub."""

    def do_HEAD(self) -> None:
        status, error = (403, "GatedRepo") if self.path.startswith("/org/gated/") else (401, "RepoNotFound")
        self.send_response(status)
        self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()


ASK = """
import sys
from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.models import base_model
for path in sys.argv[1:]:
    try:
        base_model.load(BaseModelSettings(name="tiny", path=path))
    except SetupError as error:
        print(error)
"""


def told(endpoint: str, home: str, *paths: str) -> list[str]:
    """The refusals of these models by a process that loads them."""
    # huggingface_hub reads the hub's address when it is imported.
    own = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": home}
    command = [sys.executable, "-c", ASK, *paths]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})
    return done.stdout.splitlines()


def test_a_model_that_the_hub_does_not_give_is_named_with_the_cause_and_the_local_form(tmp_path: Path) -> None:
    with serving(Hub) as endpoint:
        gated, unknown = told(endpoint, str(tmp_path), "org/gated", "org/unknown")
    assert "from 'org/gated' on the Hugging Face hub: it is gated: ask for access there, and set HF_TOKEN" in gated
    assert "from 'org/unknown' on the Hugging Face hub: there is no such model, or it is private" in unknown
    assert all(line.endswith("--base-model tiny=/path/to/folder") for line in (gated, unknown))


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    """Nobody, not even root, may make a folder in /sys."""
    with hub_of_models() as hub:
        hub.repos["org/m"] = tiny_qwen3(tmp_path / "m")
        (line,) = told(hub.url, "/sys/cache", "org/m")
    assert "on the Hugging Face hub: /sys/cache: " in line
    assert "; set HF_HOME to a folder that this user can write; or give a local folder: --base-model tiny=/path" in line
