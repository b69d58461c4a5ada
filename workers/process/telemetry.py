"""Worker metrics (Prometheus), one log line for each Op, its events and spans, and the service time of calls here."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from app import ids
from app.dispatch import KINDS, TaskEvents
from app.errors import SetupError
from app.settings import METRICS_PORT_VARIABLE
from app.stores.redis.types import Entry
from workers.process.gpu_metrics import GpuMetrics
from workers.process.op_traces import OpTraces

log = logging.getLogger("tinsmith.ops")
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
STAGE_SECONDS = Histogram(
    "tinsmith_op_stage_seconds",
    "Time of an Op in each stage: wait, run, write, commit",
    ["kind", "stage"],
    buckets=_BUCKETS,
)
OPS = Counter("tinsmith_ops_total", "Ops that finished on this worker", ["kind", "state"])
LOST_ATTEMPTS = Counter(
    "tinsmith_lost_attempts_total",
    "Attempts that ended with their worker or broke its backend, of Ops that finished here",
    ["kind"],
)
GIVEN_UP = Counter(
    "tinsmith_given_up_ops_total",
    "Ops given up after three attempts: their workers died, or their backend or restore broke",
    ["kind"],
)
TOKENS = Counter(
    "tinsmith_tokens_total",
    "Tokens trained on, read as prompts (the sum of prefilled and cached), or sampled",
    ["use"],
)
PASS_OPS = Histogram("tinsmith_pass_ops", "Ops of different models in one pass", buckets=(1, 2, 4, 8, 16, 32, 64))
MODELS = Gauge("tinsmith_resident_models", "Models this worker owns")
RESTORE_SECONDS = Histogram(
    "tinsmith_restore_seconds",
    "Time to restore a model: its snapshot, then its journal",
    buckets=(*_BUCKETS, 300),
)
REPLAYED = Counter("tinsmith_replayed_ops_total", "Ops that a restore ran again without an answer")
SNAPSHOT_AGE = Gauge(
    "tinsmith_snapshot_age_seconds",
    "Longest time for which changes of a model here are in no durable snapshot",
)
ADAPTERS = Gauge("tinsmith_loaded_adapters", "Adapters in the sampler's engine")
ADAPTER_USES = Counter(
    "tinsmith_adapter_uses_total",
    "Requests whose adapter was in the engine (hit) or was loaded (miss)",
    ["cache"],
)
BATCH_SEQUENCES = Gauge("tinsmith_batch_sequences", "Sequences that the sampler's engine decodes now")
BATCH_CAPACITY = Gauge("tinsmith_batch_capacity", "Sequences that the sampler's engine can decode at once")
BATCH_WAITING = Gauge("tinsmith_batch_waiting", "Requests that wait in this sampler for a place in the batch")
LEASES_LAPSED = Counter("tinsmith_lost_leases_total", "Leases that this worker lost because it renewed them too late")
REFUSED = Counter("tinsmith_refused_commits_total", "Commits refused, because another worker had taken over the model")

GPUS = GpuMetrics()
REGISTRY.register(GPUS)

# Weight of the earlier calls at each call: the last 50 calls make up two thirds of the average.
_KEPT = 0.98


class ServiceTime:
    """The service time of calls. Calls that run together, in one pass or one batch, end together. So the measure is the
    time between their ends, without the time in which nothing ran. May be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = float("-inf")
        self._busy_s = self._calls = 0.0

    def ended(self, took_s: float) -> None:
        """Records that a call which began `took_s` seconds ago has just ended."""
        with self._lock:
            now = self._clock()
            self._busy_s = _KEPT * self._busy_s + min(took_s, now - self._ended)
            self._calls = _KEPT * self._calls + 1
            self._ended = now

    def seconds(self) -> float:
        """Seconds of busy time per call, averaged over the last calls; 0 before the first."""
        with self._lock:
            return self._busy_s / self._calls if self._calls else 0.0


SERVICE_TIME = ServiceTime()


def serve_metrics(configured: int, environ: Mapping[str, str] = os.environ) -> str:
    """Starts the /metrics endpoint and returns its URL: on the port that `tinsmith up` gave to this worker, else on the
    `configured` one. With 0 as the setting it is a loopback port, and any free one if another process took that.

    Raises SetupError when a port of the settings is taken."""
    GPUS.start()
    port = int(environ.get(METRICS_PORT_VARIABLE, configured))
    try:
        server, _ = start_http_server(port, addr="0.0.0.0" if configured else "127.0.0.1")
    except OSError as error:
        if configured:
            raise SetupError(
                f"cannot serve metrics on port {port}: {error.strerror or error}; stop the process that uses it, or "
                "choose another metrics_port"
            ) from None
        server, _ = start_http_server(0, addr="127.0.0.1")
    return f"http://127.0.0.1:{server.server_port}/metrics"


def commit_refused(entry: Entry, epoch: int) -> None:
    REFUSED.inc()
    op_abandoned(entry.request_id, "another worker owns the model")
    where = {"model_id": ids.parent_of(entry.request_id), "seq": entry.seq, "epoch": epoch}
    log.warning("commit refused", extra={"request_id": entry.request_id, **where})


_task_events: TaskEvents | None = None
_op_traces: OpTraces | None = None


def send_task_events(events: TaskEvents) -> None:
    """Makes this process send the task events of the Ops that it runs. It sends none before."""
    global _task_events
    _task_events = events


def trace_ops(traces: OpTraces) -> None:
    """Makes this process record the spans of the Ops that it runs."""
    global _op_traces
    _op_traces = traces


def close() -> None:
    """Sends the events and spans that wait."""
    if _task_events:
        _task_events.close()
    if _op_traces:
        _op_traces.close()


def op_started(entry: Entry, project: str) -> None:
    """An attempt of the Op begins."""
    if _task_events and entry.kind in KINDS:
        _task_events.started(entry.request_id, entry.kind, project, entry.attempts)
    if _op_traces:
        _op_traces.started(entry, project)


def restored(request_id: str, seconds: float) -> None:
    """A model was restored, so that this Op can run."""
    RESTORE_SECONDS.observe(seconds)
    if _op_traces:
        _op_traces.restored(request_id, seconds)


def op_retried(request_id: str, kind: str, why: str) -> None:
    """An attempt ended without a result and is not counted; another one follows."""
    if _task_events and kind in KINDS:
        _task_events.retried(request_id, why)
    if _op_traces:
        _op_traces.abandoned(request_id, why)


def op_abandoned(request_id: str, why: str) -> None:
    """An attempt ended without a result. Another worker has the result, or this attempt is counted and the next one
    reports it."""
    if _op_traces:
        _op_traces.abandoned(request_id, why)


def op_revoked(request_id: str) -> None:
    """A call ended elsewhere without a result of a run: it was cancelled, or its model or session has ended."""
    if _task_events:
        _task_events.revoked(request_id)


def op_done(entry: Entry, *, failed: bool, run_s: float, commit_s: float, ops_in_pass: int = 1) -> None:
    """Records the end of an Op. `run_s` and `commit_s`: seconds of its run and of its commit."""
    state = "failed" if failed else "done"
    if _op_traces:
        _op_traces.ended(entry.request_id, failed=failed, run_s=run_s, commit_s=commit_s, ops_in_pass=ops_in_pass)
    if _task_events and entry.kind in KINDS:
        _task_events.ended(entry.request_id, failed=failed, took_s=run_s + commit_s)
    SERVICE_TIME.ended(run_s + commit_s)
    for stage, seconds in (("wait", entry.waited_s), ("run", run_s), ("commit", commit_s)):
        STAGE_SECONDS.labels(entry.kind, stage).observe(seconds)
    OPS.labels(entry.kind, state).inc()
    if entry.attempts:
        LOST_ATTEMPTS.labels(entry.kind).inc(entry.attempts)
    log.info(
        "%s %s",
        entry.kind,
        state,
        extra={
            "request_id": entry.request_id,
            "model_id": ids.parent_of(entry.request_id),
            "seq": entry.seq,
            "waited_s": round(entry.waited_s, 4),
            "run_s": round(run_s, 4),
            "commit_s": round(commit_s, 4),
            "ops_in_pass": ops_in_pass,
        },
    )
