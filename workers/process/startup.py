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

from app.errors import SetupError
from app.stack.supervisor import SETUP_ERROR_CODE


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile, and what is there then is never looked through: a worker's start makes millions
    of objects, and nearly all stay until its end. Of the 5.2 s of CPU time in which a trainer imports what it needs,
    collections took 0.9."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # Else libraries report it as leaked when the process ends.
        atexit.register(gc.unfreeze)


def refuse(name: str, error: SetupError) -> NoReturn:
    """End this process with status 2, its last words one line that begins with its `name`.

    Not with SystemExit, which Celery swallows in a handler, and on whose way out a rank of a group may abort.
    """
    if error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(SETUP_ERROR_CODE)
