"""The worker of this process: backend, journal, leases, pulse, sweeper. Made when Celery starts."""

from __future__ import annotations

from celery import Celery

from app import doorbell
from app.errors import SetupError
from app.settings import BaseModelSettings, Settings
from workers.runtime import sampler, trainer
from workers.runtime.parts import Parts
from workers.runtime.running import Runtime

_current: Runtime | None = None


def current() -> Runtime:
    assert _current is not None, "tasks run only after start()"
    return _current


def start(settings: Settings, celery: Celery, node_name: str, queues: list[str]) -> str:
    """Become the trainer or sampler that `queues` says; returns the further queue only this node reads.

    Raises SetupError when the queues name no base model of the settings, or its engine cannot start.
    """
    global _current
    role, base, queue = _role(settings, queues)
    kind = sampler if role in ("sample", "fullsample") else trainer
    full = role in ("full", "fullsample")
    _current = kind.make(settings, base, Parts.of(settings, celery, node_name), node_name, queue, full=full)
    return doorbell.direct_queue(queue, node_name)


def _role(settings: Settings, queues: list[str]) -> tuple[str, BaseModelSettings, str]:
    for queue in queues:
        role, _, name = queue.partition(".")
        base = settings.base_model(name)
        if role in ("train", "full", "sample", "fullsample") and base is not None:
            return role, base, queue
    names = ", ".join(base.name for base in settings.base_models) or "none"
    raise SetupError(
        f"-Q {','.join(queues)} names no base model: use train.<base>, full.<base>, sample.<base> or "
        f"fullsample.<base>; the settings have {names}"
    )
