"""The orderly stop of a worker: takes no new work, and returns its running requests to the journal before its
supervisor kills it.

A supervisor sends SIGTERM, and SIGKILL after a grace: 10 s under `tinsmith up` and Docker's default, 60 s in our
compose file, 60 or 90 s in the Helm chart. A running task may end within 7 s. Otherwise its request goes back to the
journal, at no attempt, and another worker runs it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import redis

from workers.process.runtime import exit_on_hang

log = logging.getLogger(__name__)
# The rest of the shortest grace is for the state server, which may be slow.
_WITHIN_S = 7.0
# The pause before a second call. A task that was just about to begin another request has begun it by then, so the
# second call gives that one back too.
_AGAIN_S = 0.2
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def start(leave: Callable[[], None], hand_back: Callable[[], None]) -> None:
    """From now on calls `leave` after a signal to end. If the process lives 7 s later, it returns running requests to
    the journal and ends the process.

    Called from the main thread.

    Python runs signal handlers between two steps of the main thread, which may be inside one call of a GPU library for
    a minute, or may hold a lock that the handler would wait for. So Celery's signal `worker_shutting_down` has no
    receiver here: its handler sends it, and takes a lock if there is one. The interpreter writes a signal's number to
    the wakeup socket at once, and a thread of its own reads it.
    """
    received, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this worker's
    arguments = received, wake, leave, hand_back
    threading.Thread(target=_await_signal, args=arguments, name="orderly stop", daemon=True).start()


def _await_signal(
    received: socket.socket, wake: socket.socket, leave: Callable[[], None], hand_back: Callable[[], None]
) -> None:
    with received, wake:
        while not _SIGNALS & set(received.recv(64)):
            pass
        leave()
        time.sleep(_WITHIN_S)
        log.warning("running requests return to the journal, because they take longer than %.0f s", _WITHIN_S)
        with exit_on_hang():
            for _ in range(2):
                _hand_back_when_reachable(hand_back)
                time.sleep(_AGAIN_S)
        logging.shutdown()
        os._exit(0)


def _hand_back_when_reachable(hand_back: Callable[[], None]) -> None:
    """Tries again while the state server is away, until `exit_on_hang` ends the process."""
    while True:
        try:
            return hand_back()
        except (redis.RedisError, OSError) as error:
            log.warning("could not return running requests to the journal: %s", error)
            time.sleep(_AGAIN_S)
