from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def dispositions() -> Iterator[None]:
    """Restores what this process does at SIGHUP and SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
