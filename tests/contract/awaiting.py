"""What the SDK waits for right now. A sample it is still asking for when it is given up, it cannot cancel."""

from __future__ import annotations

import re

import requests
import tinker


def held_polls(url: str) -> int:
    metrics = requests.get(f"{url}/metrics", timeout=30).text
    found = re.search(r"^tinsmith_held_polls (\S+)", metrics, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def awaited(url: str, client: tinker.SamplingClient) -> int:
    """The client's samples, in one poll for all or in one each; no other client may hold polls of its own."""
    if client._futures_poller is not None:
        return len(client._futures_poller._events)
    return held_polls(url)
