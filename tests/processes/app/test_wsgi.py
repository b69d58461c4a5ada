"""Heartbeat of the API process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from tests.api_server import serve
from tests.servers import start_valkey


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_says_that_calls_can_come_in_for_as_long_as_it_lives(tmp_path: Path):
    with start_valkey(tmp_path / "valkey") as url, connect(url) as client:
        assert not client.exists(keys.TAKING_CALLS)
        with serve(tmp_path, url):
            await_true(lambda: client.exists(keys.TAKING_CALLS) == 1)
        await_true(lambda: client.exists(keys.TAKING_CALLS) == 0)


def test_no_call_comes_in_while_its_disk_is_nearly_full(tmp_path: Path):
    """The bound is one that no disk can keep; tests/contract/test_small_disk.py fills a disk."""
    with (
        start_valkey(tmp_path / "valkey") as url,
        connect(url) as client,
        serve(tmp_path, url, extra=f"[engine]\nfree_disk_bytes = {2**62}"),
    ):
        await_true(lambda: "engine.free_disk_bytes" in RedisOpLog(client, EngineSettings()).shortage())
