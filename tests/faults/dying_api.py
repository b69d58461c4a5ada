"""The API as gunicorn serves it, with a fuse that kills it: `gunicorn tests.faults.dying_api:application`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.api.base import EXTENSION
from app.services.container import Services
from app.settings import from_environment
from app.wsgi import application
from tests.faults.fuse import BEFORE_DISPATCH, BEFORE_JOURNAL, Fuse


def _arm(services: Services, fuse: Fuse) -> None:
    dispatcher = services.admission._dispatcher
    for part, name, place in (
        (services.oplog, "admit", BEFORE_JOURNAL),
        (services.oplog, "admit_sample", BEFORE_JOURNAL),
        (dispatcher, "send", BEFORE_DISPATCH),
    ):
        setattr(part, name, _dying(getattr(part, name), place, fuse))


def _dying(call: Callable[..., Any], place: str, fuse: Fuse) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fuse.burn(place)
        return call(*args, **kwargs)

    return wrapped


_arm(application.extensions[EXTENSION], Fuse(from_environment().data_dir))
