"""The start of a worker's process, and its end when the setup is wrong."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from app.errors import SetupError, UnservableModel
from app.stack.supervisor import SETUP_ERROR_CODE, UNSERVABLE_CODE


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns the garbage collector off in the block, and then freezes all objects. A worker's start makes millions of
    objects, and nearly all of them stay until its end. Of the 5.2 s of CPU time in which a trainer imports its modules,
    collections took 0.9 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # Otherwise libraries report these objects as leaked when the process ends.
        atexit.register(gc.unfreeze)


def refuse(name: str, error: SetupError) -> NoReturn:
    """Ends this process with status 2, or 3 for an UnservableModel, which has no traceback. Its last output is one line
    that begins with its `name`.

    It does not raise SystemExit: Celery swallows that in a handler, and a rank of a group may abort on the way out.
    """
    unservable = isinstance(error, UnservableModel)
    if error.__cause__ is not None and not unservable:
        traceback.print_exception(error.__cause__)
    print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(UNSERVABLE_CODE if unservable else SETUP_ERROR_CODE)
