"""Other clients of the state server beside calls and results of many megabytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from app import ids
from app.domain.records import Model
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease

_ROUNDS = 5


def measure(url: str, size: int) -> dict[str, float]:
    """The longest PING in ms beside each step of a call of so many bytes with a result of as many: the median of some
    rounds. The pings of a process without calls come first."""
    model_id, content = ids.model_id(ids.new_session_id(), 0), os.urandom(size)
    with connect(url) as client:
        oplog = RedisOpLog(client, EngineSettings(payload_budget_bytes=2**33, result_budget_bytes=2**33))
        oplog.create_model(model_id, dump(Model("bench", model_id, "bench/base", time.time())))
        lease = oplog.acquire(model_id, "bench/1")
        assert isinstance(lease, Lease)
        found: dict[str, list[float]] = {}
        for seq in range(_ROUNDS):
            steps: dict[str, Callable[[], Any]] = {
                "nothing": partial(time.sleep, 0.5),
                "admit": partial(oplog.admit, model_id, seq, "forward", content, str(seq)),
                "next": partial(oplog.next, lease, seq),
                "commit": partial(oplog.commit, lease, seq, Result(content)),
                "poll": partial(oplog.future, ids.request_id(model_id, seq), {"bench"}),
            }
            for name, step in steps.items():
                found.setdefault(name, []).append(_longest_ping(url, step))
    return {name: float(np.median(longest)) for name, longest in found.items()}


def _longest_ping(url: str, step: Callable[[], Any]) -> float:
    longest, over = 0.0, threading.Event()

    def ping() -> None:
        nonlocal longest
        with connect(url) as client:
            client.ping()
            while not over.is_set():
                started = time.perf_counter()
                client.ping()
                longest = max(longest, 1000 * (time.perf_counter() - started))
                time.sleep(0.001)

    pings = threading.Thread(target=ping)
    pings.start()
    try:
        step()
    finally:
        over.set()
        pings.join()
    return longest
