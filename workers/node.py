"""This worker as others see it: a name, a record that lapses when it dies, a metrics address."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import redis

from app.domain.base_models import BaseModelInfo
from app.domain.records import Worker, dump
from app.stores.interfaces import Records

log = logging.getLogger(__name__)
BEAT_S = 3.0
LIFE_S = 15.0


def worker_name(node: str) -> str:
    """ "node/boot": the node is where it can be rung, the boot tells this process from the one before."""
    return f"{node}/{uuid.uuid4().hex[:8]}"


class Presence:
    """Keeps the Worker record alive from `start` until `stop`; ends the process once `healthy` says no."""

    def __init__(
        self,
        records: Records,
        node: str,
        role: str,
        info: BaseModelInfo,
        describe: Callable[[], Mapping[str, Any]],
        metrics_url: str,
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._healthy = healthy
        self._records, self._node, self._role, self._info = records, node, role, info
        self._describe, self._metrics_url = describe, metrics_url
        self._started = time.time()
        self._stop = threading.Event()

    def start(self) -> None:
        self._beat()
        threading.Thread(target=self._loop, name="presence", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._records.delete(Worker.namespace, self._node)

    def _beat(self) -> None:
        worker = Worker(
            role=self._role,
            base_model=self._info.name,
            info=asdict(self._info),
            describe=dict(self._describe()),
            metrics_url=self._metrics_url,
            started=self._started,
        )
        self._records.put(Worker.namespace, self._node, dump(worker), ttl_s=LIFE_S)

    def _loop(self) -> None:
        while not self._stop.wait(BEAT_S):
            if not self._healthy():
                log.error("the engine is dead: ending, to be started again")
                os._exit(1)  # an orderly stop would wait for requests that never come back
            try:
                self._beat()
            except (redis.RedisError, OSError) as error:
                log.warning("could not tell that we are alive: %s", error)
