"""`python -m tests.ui.lighthouse`: Lighthouse's scores of each page of the console, on a stack that has trained.

The exit code is 1 when a score is below 95, or when `lighthouse` or Chromium is missing. Lighthouse opens addresses, so
it does not see the answers of forms: test_console.py checks those with axe.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import requests

from app.settings import hash_key
from tests.contract.data import supervised, train
from tests.contract.stack import API_KEY, BASE, Stack, running
from tests.models import tiny_qwen3
from tests.servers import free_port
from tests.ui.test_console import CHROMIUM

_LEAST = 95
_FORMS: dict[str, Sequence[str]] = {"mobile": (), "desktop": ("--preset=desktop",)}
_CATEGORIES = ("performance", "accessibility", "best-practices", "seo")
_SETTINGS = f'operator_keys = ["{hash_key(API_KEY)}"]\n[prices]\ntraining = 0.40\nsampling = 0.80'


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the stack would outlive this process
    lighthouse = shutil.which("lighthouse")
    if lighthouse is None or CHROMIUM is None:
        print("install both: `npm install --global lighthouse`, and Chromium (on Debian: `apt install chromium`)")
        return 1
    with tempfile.TemporaryDirectory() as name:
        data, base = Path(name) / "data", tiny_qwen3(Path(name) / "base")
        with running(Stack(data, base, free_port(), extra=_SETTINGS)) as stack:
            return _measure(lighthouse, stack.url, _pages(stack), _logged_in(stack.url))


def _pages(stack: Stack) -> dict[str, str]:
    """The address of each page by its name. Two runs have steps and checkpoints, and a project has a member."""
    runs = []
    with stack.client() as service:
        for rank in (4, 8):
            client = service.create_lora_training_client(base_model=BASE, rank=rank, seed=rank).result()
            train(client, 20, supervised(seed=rank))
            client.save_weights_for_sampler("first").result()
            runs.append(client.get_info().model_id)
    browser = _logged_in(stack.url)
    _send(browser, stack.url, "projects", "organisations", name="Tinkers")
    form = browser.get(f"{stack.url}/console/projects").text
    organisation = re.findall(r'<option value="([^"]+)"', form)[0]
    project = _send(browser, stack.url, "projects", "projects", organisation=organisation, name="kettles")
    _send(browser, stack.url, project, f"{project}/members", email="jo@example.org", role="member")
    names = ("login", "runs", "checkpoints", "playground", "queue", "account", "usage", "events", "projects")
    return {name: name for name in names} | {
        "run": f"runs/{runs[0]}",
        "changes of a run": f"runs/{runs[0]}/events",
        "compare": f"compare?run={runs[0]}&run={runs[1]}",
        "project": project,
    }


def _logged_in(url: str) -> requests.Session:
    browser = requests.Session()
    _send(browser, url, "login", "login", api_key=API_KEY)
    return browser


def _send(browser: requests.Session, url: str, page: str, form: str, **fields: str) -> str:
    """Sends a form of the page. Returns the address that it leads to, below /console/."""
    found = re.search(r'name="csrf_token" value="([^"]+)"', browser.get(f"{url}/console/{page}").text)
    assert found, f"{page} has no form"
    answer = browser.post(f"{url}/console/{form}", {"csrf_token": found[1], **fields})
    answer.raise_for_status()
    return answer.url.removeprefix(f"{url}/console/")


def _measure(lighthouse: str, url: str, pages: dict[str, str], browser: requests.Session) -> int:
    """Prints a row of scores for each page. Returns 1 if one is too low."""
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    print(f"| Page | Form | {' | '.join(_CATEGORIES)} |\n|---|---|{'--:|' * len(_CATEGORIES)}")
    lowest = 100
    for name, page in pages.items():
        for form, options in _FORMS.items():
            scores = _scores([lighthouse, f"{url}/console/{page}", *options], cookie)
            print(f"| {name} | {form} | {' | '.join(map(str, scores))} |", flush=True)
            lowest = min(lowest, *scores)
    return int(lowest < _LEAST)


def _scores(command: Sequence[str], cookie: str) -> list[int]:
    """The score in each category, 0 to 100."""
    sandbox = "" if os.getuid() else " --no-sandbox"  # Chromium's does not start for root
    options = ["--quiet", "--output=json", f"--chrome-flags=--headless=new{sandbox}"]
    report = subprocess.run(
        [*command, *options, f"--extra-headers={json.dumps({'Cookie': cookie})}"],
        env={**os.environ, "CHROME_PATH": str(CHROMIUM)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(report.stdout)
    assert found["finalDisplayedUrl"] == command[1], f"{command[1]} led to {found['finalDisplayedUrl']}"
    return [round(100 * found["categories"][category]["score"]) for category in _CATEGORIES]


if __name__ == "__main__":
    sys.exit(main())
