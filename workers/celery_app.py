"""The Celery app of every worker and of Flower: `celery -A workers.celery_app worker|flower`.

The queue that a worker reads decides its role: `-Q train.<base>` makes a trainer and `-Q sample.<base>` a sampler.
full.<base> and fullsample.<base> make those of full fine-tunes. Heavy libraries load only when a worker starts, so
Flower starts light.
"""

from __future__ import annotations

import logging
import os
import traceback
from contextlib import ExitStack
from typing import Any

from celery import signals

from app import dispatch, settings
from app.errors import SetupError
from workers.process import gpu_start_locks
from workers.process.startup import refuse, uncollected

config = settings.from_environment()
app = dispatch.celery_app(config)
app.conf.include = ["workers.process.runtime"]


@signals.setup_logging.connect
def _log_as_json(**_: Any) -> None:
    from app.telemetry import WithoutTasks, configure_logging

    configure_logging()
    logging.getLogger().handlers[0].addFilter(WithoutTasks())


@signals.worker_init.connect
def _become(sender: Any, **_: Any) -> None:
    """Builds the runtime before the first task; a wrong setup ends the process with one line and status 2.

    Celery swallows an exception that a signal handler raises. So every failure here must end the process here.
    """
    queues = list(app.amqp.queues.consume_from)
    samples = any(work.samples for work in map(dispatch.parse_queue, queues) if work)
    try:
        with uncollected(), ExitStack() as locks:
            lock = gpu_start_locks.starting(config.handover_dir, gpu_start_locks.visible(os.environ), alone=samples)
            # The imports take seconds. So of a sampler and a trainer that a stack starts together, the sampler is
            # first: after the trainer, vLLM would measure its memory beside one that may compute already.
            if samples:
                locks.enter_context(lock)
            from workers.process import assembly, orderly_stop, runtime

            if not samples:
                locks.enter_context(lock)
            direct = assembly.start(config, app, sender.hostname, queues)
    except SetupError as error:
        refuse(sender.hostname.partition("@")[0], error)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Now, and not when the worker is ready: a broker that does not answer must not keep it from ending.
    orderly_stop.start(runtime.current().leave, runtime.current().hand_back)
    app.amqp.queues.select_add(direct)


@signals.worker_ready.connect
def _announce(**_: Any) -> None:
    from workers.process import runtime

    runtime.current().announce()


@signals.worker_shutdown.connect
def _stop(**_: Any) -> None:
    from workers.process import runtime

    runtime.current().stop()
