"""Waits until a condition holds, or until the SDK waits for its samples.

If a sample is given up while the SDK still asks for it, the SDK cannot cancel it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import requests
import tinker

_WITHIN_S = 240


def await_true(what: Callable[[], object], why: str) -> None:
    """Waits until `what` is true. `why` names the fault when it never is."""
    deadline = time.monotonic() + _WITHIN_S
    while not what():
        assert time.monotonic() < deadline, f"in vain for {_WITHIN_S} s: {why}"
        time.sleep(0.02)


def held_polls(url: str) -> int:
    metrics = requests.get(f"{url}/metrics", timeout=120).text
    found = re.search(r"^tinsmith_held_polls (\S+)", metrics, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def awaited(url: str, client: tinker.SamplingClient) -> int:
    """The client's waiting samples: one poll holds all, or one poll holds each. No other client may hold polls."""
    if client._futures_poller is not None:
        return len(client._futures_poller._events)
    return held_polls(url)
