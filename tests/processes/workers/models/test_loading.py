from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.http_server import Handler, serving


class Hub(Handler):
    """Refuses every file of a model in the same way as the hub."""

    def do_HEAD(self) -> None:
        status, error = (403, "GatedRepo") if self.path.startswith("/org/gated/") else (401, "RepoNotFound")
        self.send_response(status)
        self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()


ASK = """
from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.models import base_model
for path in ("org/gated", "org/unknown"):
    try:
        base_model.load(BaseModelSettings(name="tiny", path=path))
    except SetupError as error:
        print(error)
"""


def test_a_model_that_the_hub_does_not_give_is_named_with_the_cause_and_the_local_form(tmp_path: Path) -> None:
    with serving(Hub) as endpoint:
        # huggingface_hub reads the hub's address when it is imported.
        own = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env={**os.environ, **own})
    gated, unknown = done.stdout.splitlines()
    assert "from 'org/gated' on the Hugging Face hub: it is gated: ask for access there, and set HF_TOKEN" in gated
    assert "from 'org/unknown' on the Hugging Face hub: there is no such model, or it is private" in unknown
    assert all(line.endswith("--base-model tiny=/path/to/folder") for line in (gated, unknown))
