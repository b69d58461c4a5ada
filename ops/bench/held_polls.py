"""Polls held by an API process, a heartbeat beside them, and the time from a result to its answer.

Each poll has a connection of its own. Its client polls again at once after an answer without a result, as the SDK does,
and waits for another future after a result.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app import ids
from app.domain.records import Model
from app.domain.results import Result
from app.services.tenants.authentication import project_of
from app.settings import hash_key
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from ops.bench import metrics, servers
from ops.bench.api_body import INFO
from ops.bench.client import Client
from ops.bench.timing import summary

_CONNECTING = 64
_START_S = 300.0
_BEAT_EVERY_S = 0.05
_WAKE_EVERY_S = 0.1
_NOTHING = frozenset[tuple[str, str]]()
PROJECT = project_of(hash_key(servers.API_KEY))


@dataclass
class Seen:
    """The clients' view: the times at which results arrived, and the number of answers without one."""

    arrived: dict[str, float] = field(default_factory=dict)
    again: int = 0


def clients_for(polls: int) -> int:
    """The clients of which so many can be held at every moment: 1 % may be between an answer and their next poll."""
    return polls + polls // 100


def measure(api: servers.Api, polls: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """Figures of `seconds`. They begin `warm_s` after so many polls are held, so that holds which began together have
    come apart."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with connect(api.settings.redis.url) as redis, closing(Client(api.url)) as client:
        oplog = RedisOpLog(redis, api.settings.engine)
        session = client.call("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        model_ids = [
            ids.model_id(session, number) for number in range(max(clients_for(polls), int(seconds / _WAKE_EVERY_S)))
        ]
        for model_id in model_ids:
            fields = dump(Model(PROJECT, session, INFO.name, time.time()))
            oplog.admit(model_id, 0, "create_model", b"", "", fields)
        return asyncio.run(_Run(api, oplog, session, model_ids).measure(polls, warm_s, seconds))


class _Run:
    def __init__(self, api: servers.Api, oplog: RedisOpLog, session: str, model_ids: list[str]) -> None:
        self._api, self._oplog, self._session, self._model_ids = api, oplog, session, model_ids
        self._seen, self._committed = Seen(), dict[str, float]()
        self._connecting = asyncio.Semaphore(_CONNECTING)

    async def measure(self, polls: int, warm_s: float, seconds: float) -> dict[str, Any]:
        clients = [asyncio.create_task(self._poll(number)) for number in range(clients_for(polls))]
        try:
            await self._await_held(polls)
            await asyncio.sleep(warm_s)
            before, again, began = await self._cpu_s(), self._seen.again, time.monotonic()
            held: list[float] = []
            wake = asyncio.create_task(self._wake(seconds))
            beats = await self._beat(seconds, held)
            await wake
            await asyncio.sleep(1)
            after, again = await self._cpu_s(), self._seen.again - again
            passed = time.monotonic() - began  # more than `seconds`: the last futures end later
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        wakes = [1000 * (self._seen.arrived[id_] - at) for id_, at in self._committed.items()]
        return {
            "polls": polls,
            "clients": len(clients),
            "held": min(held),
            "seconds": seconds,
            "polls_again_per_s": again / passed,
            "cores": (after - before) / passed,
            "heartbeat_ms": _summary(beats),
            "wake_ms": _summary(wakes),
        }

    async def _poll(self, number: int) -> None:
        """One client: polls for a future until it is done, and then for the next that is not."""
        async with self._connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._api.settings.api.port)
        with closing(writer):
            while True:
                request_id = ids.request_id(self._model_ids[number % len(self._model_ids)], 0)
                status = await _exchange(reader, writer, "retrieve_future", {"request_id": request_id})
                if status == 200:
                    self._seen.arrived.setdefault(request_id, time.perf_counter())
                    number += 1
                elif status == 408:
                    self._seen.again += 1
                else:
                    raise RuntimeError(f"a poll was answered with {status}")

    async def _await_held(self, polls: int) -> None:
        deadline = time.monotonic() + _START_S
        while (held := await self._held()) < polls:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{held:.0f} of {polls} polls are held after {_START_S:.0f} s")
            await asyncio.sleep(0.5)

    async def _beat(self, seconds: float, held: list[float]) -> list[float]:
        """Returns the ms of heartbeats on one connection, each some time after the other's answer."""
        found: list[float] = []
        until = time.monotonic() + seconds
        reader, writer = await asyncio.open_connection("127.0.0.1", self._api.settings.api.port)
        with closing(writer):
            while time.monotonic() < until:
                if len(found) % 100 == 0:
                    held.append(await self._held())
                started = time.perf_counter()
                body = {"session_id": self._session, "type": "session_heartbeat"}
                status = await _exchange(reader, writer, "session_heartbeat", body)
                found.append(1000 * (time.perf_counter() - started))
                if status != 200:
                    raise RuntimeError(f"a heartbeat was answered with {status}")
                await asyncio.sleep(_BEAT_EVERY_S)
        return found

    async def _wake(self, seconds: float) -> None:
        """Ends a future every now and then, and notes the times before its result is written."""
        for model_id in self._model_ids[:: max(1, int(len(self._model_ids) * _WAKE_EVERY_S / seconds))]:
            await asyncio.to_thread(self._commit, model_id)
            await asyncio.sleep(_WAKE_EVERY_S)

    def _commit(self, model_id: str) -> None:
        lease = self._oplog.acquire(model_id, "bench/1")
        assert isinstance(lease, Lease)
        self._committed[ids.request_id(model_id, 0)] = time.perf_counter()
        self._oplog.commit(lease, 0, Result(json.dumps({"model_id": model_id}).encode()))

    async def _held(self) -> float:
        reading = await asyncio.to_thread(metrics.read, f"{self._api.url}/metrics")
        return reading["tinsmith_held_polls", _NOTHING]

    async def _cpu_s(self) -> float:
        reading = await asyncio.to_thread(metrics.read, f"{self._api.url}/metrics")
        return reading["process_cpu_seconds_total", _NOTHING]


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: Any) -> int:
    """Sends a call and reads its answer. Returns the status."""
    content = json.dumps(body).encode()
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {servers.API_KEY}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    found = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(found.partition("content-length:")[2].partition("\r\n")[0]))
    return int(found.split()[1])


def _summary(samples: list[float]) -> dict[str, float]:
    return {**summary(samples), "p99": float(np.percentile(samples, 99))}
