"""Worker metrics (Prometheus) and one log line an Op."""

from __future__ import annotations

import logging

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from app.stores.interfaces import Entry
from workers.health.pace import Pace

log = logging.getLogger("tinsmith.ops")

_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
STAGE_SECONDS = Histogram(
    "tinsmith_op_stage_seconds", "Time of an Op in each stage: wait, run, commit", ["kind", "stage"], buckets=_BUCKETS
)
OPS = Counter("tinsmith_ops_total", "Ops that became terminal here", ["kind", "state"])
TOKENS = Counter("tinsmith_tokens_total", "Tokens trained on, read as prompts, or sampled", ["use"])
PASS_OPS = Histogram("tinsmith_pass_ops", "Ops of different models in one pass", buckets=(1, 2, 4, 8, 16, 32, 64))
MODELS = Gauge("tinsmith_resident_models", "Models this worker owns")
PACE = Pace()
REFUSED = Counter("tinsmith_refused_commits_total", "Commits refused, as another worker had taken the model over")


def serve_metrics(port: int) -> str:
    """Start the /metrics endpoint on `port` (0: any free one); returns its URL."""
    server, _ = start_http_server(port, addr="127.0.0.1" if port == 0 else "0.0.0.0")
    return f"http://127.0.0.1:{server.server_port}/metrics"


def commit_refused(entry: Entry, epoch: int) -> None:
    REFUSED.inc()
    where = {"model_id": entry.request_id.rpartition(":")[0], "seq": entry.seq, "epoch": epoch}
    log.warning("commit refused", extra={"request_id": entry.request_id, **where})


def op_done(entry: Entry, *, failed: bool, run_s: float, commit_s: float, ops_in_pass: int = 1) -> None:
    state = "failed" if failed else "done"
    PACE.ended(run_s + commit_s)
    for stage, seconds in (("wait", entry.waited_s), ("run", run_s), ("commit", commit_s)):
        STAGE_SECONDS.labels(entry.kind, stage).observe(seconds)
    OPS.labels(entry.kind, state).inc()
    log.info(
        "%s %s",
        entry.kind,
        state,
        extra={
            "request_id": entry.request_id,
            "model_id": entry.request_id.rpartition(":")[0],
            "seq": entry.seq,
            "waited_s": round(entry.waited_s, 4),
            "run_s": round(run_s, 4),
            "commit_s": round(commit_s, 4),
            "ops_in_pass": ops_in_pass,
        },
    )
