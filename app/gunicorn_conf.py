"""gunicorn's settings: `python -m gunicorn -c python:app.gunicorn_conf app.wsgi:application`.

Each of the api.processes has one pub/sub connection, which wakes all its held polls. A held poll is suspended
(app/suspension.py) and has no thread; a stream of tokens has one. app/services/polling.py ensures that streams never
take the whole pool.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from typing import Any

from gunicorn import glogging

from app import malloc
from app.gunicorn_worker import ARRIVING, IDLE_A_THREAD
from app.server.shared_listener import COUNTS
from app.settings import from_environment, netloc
from app.suspension import SUSPENDED_A_THREAD

_settings = from_environment()
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))

malloc.give_large_blocks_back()

bind = netloc(_settings.api.host, _settings.api.port)
workers = _settings.api.processes
worker_class = "app.gunicorn_worker.Worker"
threads = _settings.api.poll_capacity + _settings.api.spare_threads
# The SDK keeps idle HTTP/1.1 connections in pools of 50; at gunicorn's default of 1,000 the next request would hang.
# Connections whose request is still arriving have room of their own, and so have suspended requests.
worker_connections = (1 + IDLE_A_THREAD + SUSPENDED_A_THREAD) * threads + ARRIVING
backlog = 4096
keepalive = 75
# sendfile waits without end for a client that reads nothing (CPython's socket.sendfile); app/gunicorn_worker.py gives
# other sends a time.
sendfile = False
# A stream of tokens ends with the stop, which must not wait minutes for it. Held polls are answered at once.
graceful_timeout = 3
control_socket_disable = True


class logger_class(glogging.Logger):  # type: ignore[misc]  # noqa: N801
    """gunicorn's logger without an access log, which nothing here writes: the metrics count requests. With a
    `logconfig_dict` gunicorn would put together 56 fields of each request for it, in at least 20 us."""

    access_log_enabled = False


logconfig_dict = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": "app.telemetry.JsonFormatter"}},
    "filters": {"requests": {"()": "app.telemetry.WithoutRequests"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "filters": ["requests"]}},
    "loggers": {"gunicorn.error": {"level": "INFO", "handlers": ["stderr"], "propagate": False}},
    "root": {"level": "INFO", "handlers": ["stderr"]},
}

if workers > 1:
    # prometheus_client keeps the values of each process in files there; app/telemetry.py adds them up.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="tinsmith-metrics-")


def worker_exit(server: Any, worker: Any) -> None:
    """Sends the task events and spans that wait in a process that ends. One that could not start has none."""
    from app.api.base import EXTENSION

    if worker.application is not None:
        worker.application.extensions[EXTENSION].close()


def child_exit(server: Any, worker: Any) -> None:
    """Stops counting the connections and held polls of a process that has ended; its counters stay."""
    COUNTS.remove(worker.age)
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(worker.pid, folder)  # type: ignore[no-untyped-call]


def on_exit(server: Any) -> None:
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        shutil.rmtree(folder, ignore_errors=True)
