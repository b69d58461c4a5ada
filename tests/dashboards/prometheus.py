"""A real Prometheus that scrapes a stack (Debian: apt install prometheus)."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tests.servers import free_port

STEP_S = 1


@dataclass(frozen=True)
class Series:
    """The labels of a series, and its values without NaN (0 / 0) and infinities."""

    labels: Mapping[str, str]
    values: Sequence[float]


@dataclass(frozen=True)
class Prometheus:
    url: str
    started: float

    def series(self, query: str) -> list[Series]:
        """The series of a query from the start until now that have a finite value. Raises AssertionError for a query
        that is not valid."""
        asked = {"query": query, "start": self.started, "end": time.time(), "step": STEP_S}
        try:
            answer = self._get("/api/v1/query_range", asked)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        found = [Series(one["metric"], _finite(one["values"])) for one in answer["data"]["result"]]
        return [one for one in found if one.values]

    def scrape_all(self, count: int) -> None:
        """Waits until so many targets have answered after this call. Raises AssertionError after a minute."""
        asked = datetime.now(UTC)
        for _ in range(600):
            targets = self._get("/api/v1/targets", {})["data"]["activeTargets"]
            answered = [target for target in targets if target["health"] == "up"]
            if sum(datetime.fromisoformat(target["lastScrape"]) > asked for target in answered) == count:
                return
            time.sleep(0.1)
        raise AssertionError(f"{len(answered)} of {count} targets answer")

    def alerts(self) -> set[str]:
        """The names of the rules that Prometheus evaluates without an error."""
        groups = self._get("/api/v1/rules", {})["data"]["groups"]
        return {rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "ok"}

    def _get(self, path: str, asked: dict[str, Any]) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(asked)}", timeout=60) as answer:
            return json.load(answer)


def _finite(points: Sequence[tuple[float, str]]) -> list[float]:
    return [value for _, text in points if math.isfinite(value := float(text))]


@contextlib.contextmanager
def scraping(program: str, folder: Path, urls: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """Runs Prometheus over these metrics URLs, once a second, with the alert rules of a file."""
    config = {
        "global": {"scrape_interval": f"{STEP_S}s", "evaluation_interval": f"{STEP_S}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "tinsmith",
                "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc for url in urls]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        found = Prometheus(f"http://127.0.0.1:{port}", time.time())
        _await_ready(found.url, process)
        yield found
    finally:
        process.terminate()
        process.wait(60)


def _await_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "Prometheus ended; its log says why"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            return
        time.sleep(0.1)
    raise AssertionError("Prometheus is not ready after a minute")
