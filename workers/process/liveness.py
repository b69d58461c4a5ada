"""The liveness of this worker, shown to others and to itself.

Others see a record that expires when the worker dies, and its leases. A thread of their own renews the leases, so that
GPU work cannot let them lapse.

The worker itself has a watchdog: it exits when its own heartbeat task is not consumed in time. A Celery worker can be
alive and receive no tasks ("deaf"): its consumer lost the broker and did not notice, or its task thread hangs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import redis

from app.dispatch import TickSender
from app.domain.records import LAST_WORKERS, LATER_FACTS, READS_GRADIENTS, BaseModelInfo, Demand, Refusal, Worker
from app.errors import NotReplicated
from app.services.base_models import TRAINER_ROLES
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from workers.process import telemetry

log = logging.getLogger(__name__)
BEAT_S = 3.0
LIFE_S = 15.0

_LAST_BEAT_S = 2.0
_AWAY_S = 1.0
_TRIES_A_LEASE = 15


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
        self._leaving = self._stopped = self._is_recorded = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the heartbeat thread. It sends the first heartbeat at once, so that a state server that is away does
        not stop this worker from starting."""
        self.refresh()
        self._thread.start()

    def refresh(self) -> None:
        """Publishes a change soon; returns at once."""
        self._wake.set()

    def leave(self) -> None:
        """Tells others to send nothing new. May be called from any thread, but not from a signal's handler: that may
        interrupt the main thread where it holds a lock."""
        self._leaving = True
        self.refresh()

    def stop(self) -> None:
        """Deletes the record, once a heartbeat that is under way has ended, or after `_LAST_BEAT_S`."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():  # a beat under way would put the record back
            self._thread.join(_LAST_BEAT_S)
        with suppress(redis.RedisError):  # it expires by itself
            self._delete(Worker.namespace, self._node)

    def _beat(self) -> None:
        info = asdict(self._info)
        later = {fact: True for fact in LATER_FACTS if info.pop(fact)}
        reads_gradients = {READS_GRADIENTS: True} if self._role in TRAINER_ROLES else {}
        worker = Worker(
            role=self._role,
            base_model=self._info.name,
            info=info,
            describe={**self._describe(), **later, **reads_gradients},
            metrics_url=self._metrics_url,
            started=self._started,
            healthy=self._healthy() and not self._leaving,
            queue=self._queue,
            batch=self._batch,
            holds=self._holds,
            pace_s=telemetry.SERVICE_TIME.seconds(),
        )
        self._records.put(Worker.namespace, self._node, dump(worker), ttl_s=LIFE_S)
        if not self._is_recorded:
            role_and_base = Refusal.id(self._role, self._info.name)
            self._records.put(LAST_WORKERS, role_and_base, dump(worker))
            self._delete(Demand.namespace, role_and_base)
            self._delete(Refusal.namespace, role_and_base)
            self._is_recorded = True

    def _delete(self, namespace: str, key: str) -> None:
        """Deletes a record without waiting for replicas. A failover may bring the record back, which is harmless: it
        expires, or a live worker takes precedence."""
        with suppress(NotReplicated):
            self._records.delete(namespace, key)

    def _loop(self) -> None:
        is_failing = False
        while True:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._stopped:
                return
            try:
                self._beat()
                is_failing = False
            except Exception as error:  # if this thread ended, nothing else would notice
                if not is_failing:  # one line for each outage, not one for each heartbeat
                    is_outage = isinstance(error, redis.RedisError | OSError)
                    log.warning("could not send the heartbeat: %s", error, exc_info=not is_outage)
                is_failing = True


class PutOffs:
    """Puts back requests that this worker began and no longer runs; while the state server is away, they wait here.

    Until a request is put back, a death of this worker counts as an attempt at it, whatever the worker dies of.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Callable[[], None]] = {}

    def add(self, request_id: str, put_back: Callable[[], None]) -> None:
        """Calls `put_back` now if the state server can be reached, else later."""
        with self._lock:
            self._waiting[request_id] = put_back
        with suppress(redis.RedisError):
            self.flush()

    def begin(self, request_id: str) -> None:
        """Puts back a request that waits here, because this worker is about to run it again: later, that would hide
        this worker's death. Raises RedisError while the state server is away."""
        with self._lock:
            if request_id in self._waiting:
                self._put_back(request_id)

    def flush(self) -> None:
        """Puts back all that wait. Raises RedisError while the state server is away."""
        with self._lock:
            for request_id in list(self._waiting):
                self._put_back(request_id)

    def _put_back(self, request_id: str) -> None:
        self._waiting[request_id]()
        del self._waiting[request_id]


class LeaseKeeper:
    """Renews every held id three times per lease time, and soon again when that failed. The renewal also shows that
    this worker lives, even when it holds none. After it, the thread flushes `put_offs`.

    A lease that could not be renewed in time, or that someone else holds, is lost until it is added again.
    """

    def __init__(self, oplog: RedisOpLog, worker: str, lease_s: float) -> None:
        self._oplog, self._worker, self._lease_s = oplog, worker, lease_s
        self.put_offs = PutOffs()
        self._lock = threading.Lock()
        self._renewed: dict[str, float] = {}
        self._lost: dict[str, Callable[[], None]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="leases", daemon=True)
        self._thread.start()

    def add(self, id_: str, asked: float, lost: Callable[[], None] = lambda: None) -> None:
        """Adds a lease that was requested at `asked` (monotonic) and gained; the server counts its time from about
        then.

        The renewing thread calls `lost` if a renewal finds that the lease is no longer ours.
        """
        with self._lock:
            self._renewed[id_] = asked
            self._lost[id_] = lost

    def drop(self, id_: str) -> None:
        """Stops renewing a lease, which lapses at the state server unless it is released there."""
        with self._lock:
            self._renewed.pop(id_, None)
            self._lost.pop(id_, None)

    def holds(self, id_: str) -> bool:
        """True if the lease is ours and has not expired, as far as this process knows."""
        with self._lock:
            return time.monotonic() - self._renewed.get(id_, -math.inf) < self._lease_s

    def stop(self) -> None:
        """Renews nothing more. Waits for a renewal that is under way."""
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        pause_s = self._lease_s / 3
        while not self._stop.wait(pause_s):
            pause_s = self._lease_s / 3
            try:
                self._renew()
                self.put_offs.flush()
            except (redis.RedisError, OSError) as error:
                log.warning("could not renew leases: %s", error)
                # A third later the lease would be over, if it took a third until the connection was found dead.
                pause_s = self._lease_s / _TRIES_A_LEASE

    def _renew(self) -> None:
        asked = time.monotonic()
        with self._lock:
            before = dict(self._renewed)
        gone = set(self._oplog.renew(sorted(before), self._worker))
        answered = time.monotonic()
        lost = []
        with self._lock:
            for id_, since in before.items():
                # A lease dropped meanwhile stays dropped. A lease acquired anew is not the one that was renewed.
                if self._renewed.get(id_) == since:
                    if id_ in gone:
                        del self._renewed[id_]
                        lost.append(self._lost.pop(id_))
                        # A run that ended, and a request that ended or is paused, is gone before its lease lapses.
                        if answered - since >= self._lease_s:
                            telemetry.LEASES_LAPSED.inc()
                    else:
                        self._renewed[id_] = asked
        for tell in lost:
            tell()


class Watchdog:
    """The watchdog. `answered` is called when a tick is done; `working` surrounds all other work.

    A worker that does something, or whose broker is away, is not deaf. A worker that is deaf for two `healthy_s`, or
    whose engine is not `engine_healthy`, ends: `end(why)` must not return. One tick is under way at a time; a lost tick
    is dispatched again."""

    def __init__(
        self, ticks: TickSender, engine_healthy: Callable[[], bool], healthy_s: float, end: Callable[[str], object]
    ) -> None:
        self._ticks, self._engine_healthy, self._healthy_s, self._end = ticks, engine_healthy, healthy_s, end
        self._lock = threading.Lock()
        self._running = 0
        self._alive = self._checked_at = time.monotonic()
        self._unanswered: float | None = None
        """The time of the first question to the broker since its last answer."""
        self._tick_sent_at: float | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._loop, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._alive = time.monotonic()

    def answered(self) -> None:
        self._alive = time.monotonic()
        self._tick_sent_at = None

    @property
    def busy(self) -> bool:
        return self._running > 0

    def healthy(self) -> bool:
        """True if the engine is sound and the worker is not deaf. May be called from any thread, and never waits."""
        return self._engine_healthy() and self.deaf_s() <= self._healthy_s

    def deaf_s(self) -> float:
        """Seconds for which no task has reached this worker; 0 while it works or the broker is away."""
        asked = self._unanswered
        if self._running or (asked is not None and time.monotonic() - asked > _AWAY_S):
            return 0.0
        return time.monotonic() - self._alive

    def check(self) -> None:
        """Runs one round of the watchdog."""
        now = time.monotonic()
        if now - self._checked_at > self._healthy_s / 2:
            self._alive = now  # this thread was stopped too, or waited for the broker
        self._checked_at = now
        if not self._engine_healthy():
            self._end("the engine has failed")
        elif self.deaf_s() > 2 * self._healthy_s:
            self._end(f"nothing was done for {self.deaf_s():.0f} s, although tasks were dispatched to this worker")
        else:
            self._check_broker(now)

    def _check_broker(self, now: float) -> None:
        """Sends a tick if one is due. Time in which the broker was away is no silence of this worker."""
        self._unanswered = self._unanswered or now
        if not self._send_tick_if_due(now):
            return
        if now - self._unanswered > _AWAY_S:
            self._alive = time.monotonic()
        self._unanswered = None

    def _send_tick_if_due(self, now: float) -> bool:
        """Returns False when the broker is away."""
        waiting = self._ticks.waiting()
        if waiting is None:
            return False
        lost = self._tick_sent_at is not None and now - self._tick_sent_at > self._healthy_s / 2
        if self._tick_sent_at is None or (lost and waiting == 0):
            self._tick_sent_at = None
            if not self._ticks.send():
                return False
            self._tick_sent_at = now
        return True

    def _loop(self) -> None:
        while not self._stop.wait(self._healthy_s / 10):
            self.check()
