"""Removes the direct queues of workers that are gone for good, such as a pod that was replaced by one of another name.

Such a queue holds messages that nobody reads. Their calls are dispatched again from the journal.
"""

from __future__ import annotations

import json
import logging
import time

from celery import Celery
from kombu.exceptions import OperationalError

from app.dispatch import direct_queue
from app.stores.redis.journal import RedisOpLog

log = logging.getLogger(__name__)
_EVERY_S = 60.0
# A machine that restarts comes back within this time.
_GONE_S = 3600.0


class DirectQueues:
    """Deletes the queue of a node without a heartbeat for `gone_s`, as far as this leader knows, and forgets the node.

    The node is forgotten last: a worker that takes the name later declares the queue itself. For one that came back
    earlier the queue is declared again, because a queue without its bindings gets no messages.
    """

    def __init__(self, oplog: RedisOpLog, celery: Celery, gone_s: float = _GONE_S) -> None:
        self._oplog, self._celery, self._gone_s = oplog, celery, gone_s
        self._silent_since: dict[tuple[str, str], float] = {}
        self._next = 0.0

    def sweep(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        silent = self._oplog.silent_nodes().items()
        self._silent_since = {place: self._silent_since.get(place, now) for place in silent}
        for (node, claim), since in self._silent_since.items():
            if now - since >= self._gone_s:
                self._remove(node, claim)
        self._next = now + min(_EVERY_S, self._gone_s)

    def _remove(self, node: str, claim: str) -> None:
        """Deletes a queue with its bindings. kombu knows only the bindings that its own process declared."""
        name = direct_queue(json.loads(claim)["queue"], node)
        try:
            with self._celery.connection_for_write() as connection:
                queue = self._celery.amqp.queues.new_missing(name)(connection.default_channel)
                queue.declare()
                queue.delete()
                if not self._oplog.forget_node(node, claim):
                    queue.declare()
                    return
        except (OperationalError, OSError) as error:
            log.warning("could not delete the queue %s: %s", name, error)
        else:
            log.info("deleted the queue %s of a worker that is gone", name)
