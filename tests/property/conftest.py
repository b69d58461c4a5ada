from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import redis

from app.stores.redis.client import connect
from tests.servers import start_valkey
from workers.checkpoints import transfer
from workers.train import scheduler


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """One server for all examples, which flush it. It is never restarted, so nothing has to reach the disk."""
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url, connect(url) as client:
        client.config_set("appendonly", "no")
        yield client


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the logs: thousands of broken Ops would bury the steps that failed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns fsync off.

    Processes die here, the machine does not: all writes survive, and a disk would take most of the time.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries a failed download at once, and a model that was put off at its next dispatch."""
    monkeypatch.setattr(transfer, "_PAUSE_S", 0.0)
    monkeypatch.setattr(scheduler, "_FIRST_PAUSE_S", 0.0)
