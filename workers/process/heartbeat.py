"""This worker's heartbeat: a name, a record that expires when the worker dies, and a metrics address."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import redis

from app.domain.base_model import BaseModelInfo
from app.domain.records import Worker, dump
from app.stores.redis.records import RedisRecords
from workers.process import telemetry

log = logging.getLogger(__name__)
BEAT_S = 3.0
LIFE_S = 15.0


def worker_name(node: str) -> str:
    """Returns "node/boot": requests are dispatched to the node; the boot tells this process from the one before."""
    return f"{node}/{uuid.uuid4().hex[:8]}"


class Heartbeat:
    """The heartbeat: keeps the Worker record alive from `start` until `stop`."""

    def __init__(
        self,
        records: RedisRecords,
        node: str,
        role: str,
        info: BaseModelInfo,
        describe: Callable[[], Mapping[str, Any]],
        metrics_url: str,
        healthy: Callable[[], bool],
        queue: str,
        batch: int = 0,
        holds: int = 0,
    ) -> None:
        self._records, self._node, self._role, self._info = records, node, role, info
        self._describe, self._metrics_url, self._healthy = describe, metrics_url, healthy
        self._queue, self._batch, self._holds = queue, batch, holds
        self._started = time.time()
        self._leaving = self._stopped = False
        self._wake = threading.Event()

    def start(self) -> None:
        """Starts the heartbeat thread. It sends the first heartbeat at once, so that a state server that is away does
        not stop this worker from starting."""
        self.refresh()
        threading.Thread(target=self._loop, name="heartbeat", daemon=True).start()

    def refresh(self) -> None:
        """Publishes a change soon; returns at once."""
        self._wake.set()

    def leave(self) -> None:
        """Tells others to send nothing new. May be called from a signal handler."""
        self._leaving = True
        self.refresh()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        with suppress(redis.RedisError):  # it expires by itself
            self._records.delete(Worker.namespace, self._node)

    def _beat(self) -> None:
        worker = Worker(
            role=self._role,
            base_model=self._info.name,
            info=asdict(self._info),
            describe=dict(self._describe()),
            metrics_url=self._metrics_url,
            started=self._started,
            healthy=self._healthy() and not self._leaving,
            queue=self._queue,
            batch=self._batch,
            holds=self._holds,
            pace_s=telemetry.SERVICE_TIME.seconds(),
        )
        self._records.put(Worker.namespace, self._node, dump(worker), ttl_s=LIFE_S)

    def _loop(self) -> None:
        while True:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._stopped:
                return
            try:
                self._beat()
            except (redis.RedisError, OSError) as error:
                log.warning("could not send the heartbeat: %s", error)
