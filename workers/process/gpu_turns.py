"""Turns of a trainer and a sampler that share GPUs: only one of them computes at a time.

A turn is a `flock` on a file in a folder that both processes see. The kernel frees it when its process dies. Whoever
wants a turn takes the `next` lock first and keeps it until the turn is its own. So the holder sees that the other one
waits, and cannot take a further turn before it.

The holder keeps the turn until the other one asks. Then it gives the turn away as soon as it is idle for a while; if it
is busy, it begins nothing new once the turn has lasted `_TURN_S`, and ends what it has begun. A sampler sleeps and a
trainer frees its cached memory before the turn ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.domain.records import BaseModelInfo
from app.domain.results import Output
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import NoTurnYet, OpError, SetupError, Unavailable
from workers.backends.failures import StallDetector
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.backends.training.base import BackendOp, TrainingBackend, Writer

if TYPE_CHECKING:
    from workers.backends.sampling.vllm.backend import VllmSampler

log = logging.getLogger(__name__)
# A sampler of 8B parameters needs about a second to sleep and another one to wake: a tenth of two such turns.
_TURN_S = 10.0
# Requests of many clients overlap in a sampler, so a short pause shows that none is left.
_IDLE_S = 0.1
# A client of a trainer may send its next call only after the answer. A shorter limit would end the turn between them.
_TRAINER_IDLE_S = 1.0
_POLL_S = 0.02
# A wait of more than a minute is logged.
_LONG_S = 60.0


class GpuTurns:
    """The turns of this process. Safe from any thread; a thread of its own waits for the locks.

    `enter` is called when a turn begins, and `leave` before it ends, both while nothing is in use. The process is
    `healthy` until one of them fails or takes more than `deadline_s`; the turn is then kept until the process ends. A
    turn that the other process waits for ends once it is idle for `idle_s`, or once it has lasted `turn_s`.

    Raises SetupError when the folder of `file` belongs to another user, who could hold the locks for ever.
    """

    def __init__(
        self,
        file: Path,
        enter: Callable[[], None],
        leave: Callable[[], None],
        deadline_s: float,
        turn_s: float = _TURN_S,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._enter, self._leave, self._deadline_s = enter, leave, deadline_s
        self._turn_s, self._idle_s = turn_s, idle_s
        _make_own_folder(file.parent)
        self._files = [file.with_name(f"{file.name}.{kind}") for kind in ("turn", "next")]
        self._turn, self._next = map(_opened, self._files)
        self._lock = threading.Lock()
        self._asked, self._admitted = threading.Condition(self._lock), threading.Condition(self._lock)
        self._waiting = self._users = 0
        self._open = self._ended = False
        self._used_at = 0.0
        self._inside = threading.local()
        self._stall_detector = StallDetector()
        threading.Thread(target=self._loop, name="gpu-turns", daemon=True).start()

    @contextmanager
    def use(self, handle: RequestHandle | None = None, within_s: float | None = None) -> Iterator[None]:
        """Waits for a turn, which lasts at least as long as the block. A block inside another one of the same thread
        waits for nothing.

        Raises Aborted when `handle` is aborted before, NoTurnYet after `within_s`, and Unavailable in a process that
        ends. One who asks again soon after NoTurnYet keeps its place.
        """
        if getattr(self._inside, "a_turn", False):
            yield
            return
        self._begin(handle, within_s)
        self._inside.a_turn = True
        try:
            yield
        finally:
            self._inside.a_turn = False
            self._end()

    @property
    def held(self) -> bool:
        """True while a turn of this process takes new work."""
        return self._open

    def healthy(self) -> bool:
        return not self._ended and self._stall_detector.seconds <= self._deadline_s

    def close(self) -> None:
        """Begins no further turn. The present one lasts until the process ends."""
        with self._lock:
            self._ended = True
            self._admitted.notify_all()

    def _begin(self, handle: RequestHandle | None, within_s: float | None) -> None:
        if handle is not None:
            handle.on_abort(self._look_again)
        with self._lock:
            self._waiting += 1
            self._asked.notify()
            try:
                self._admitted.wait_for(
                    lambda: self._open or self._ended or (handle is not None and handle.aborted), within_s
                )
                if handle is not None and handle.aborted:
                    raise Aborted("the request was stopped before its turn on the GPU")
                if self._ended:
                    raise Unavailable("this process takes no further turn on the GPU, because it is about to end")
                if not self._open:
                    raise NoTurnYet("the sampler or the trainer that shares the GPU has its turn")
                self._users += 1
            finally:
                self._waiting -= 1

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            self._used_at = time.monotonic()
            self._asked.notify()

    def _look_again(self) -> None:
        with self._lock:
            self._admitted.notify_all()

    def _loop(self) -> None:
        try:
            while not self._ended:
                self._take_turn()
        except Exception:
            log.exception("the turn on the GPU is kept until this process ends")
            self.close()

    def _take_turn(self) -> None:
        with self._lock:
            self._asked.wait_for(lambda: self._waiting > 0)
        self._lock_turn()
        if not self._is_still_asked():
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            return
        with self._stall_detector.call():
            self._enter()
        began = self._admit()
        while not (self._is_over(began) and self._is_wanted()):
            time.sleep(_POLL_S)
        with self._lock:
            self._open = False
            self._asked.wait_for(lambda: not self._users)
            if self._ended:
                return
        with self._stall_detector.call():
            self._leave()
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _lock_turn(self) -> None:
        """Waits for the lock of the turn. Opens the files again if they were removed or replaced meanwhile."""
        with _reported("waiting for a turn on the GPU for %.0f s: the other process computes, or hangs"):
            while True:
                fcntl.flock(self._next, fcntl.LOCK_EX)
                fcntl.flock(self._turn, fcntl.LOCK_EX)
                fcntl.flock(self._next, fcntl.LOCK_UN)
                if self._are_files_there():
                    return
                for file in (self._turn, self._next):
                    os.close(file)
                _make_own_folder(self._files[0].parent)
                self._turn, self._next = map(_opened, self._files)

    def _are_files_there(self) -> bool:
        """False if the lock files were removed or replaced: another process may then lock the new ones."""
        try:
            return all(
                os.path.samestat(file.stat(), os.fstat(lock))
                for file, lock in zip(self._files, (self._turn, self._next), strict=True)
            )
        except FileNotFoundError:
            return False

    def _is_still_asked(self) -> bool:
        """True unless everyone who waited has gone. One who waits in slices comes back within `idle_s`."""
        with self._lock:
            self._asked.wait_for(lambda: self._waiting > 0 or self._ended, self._idle_s)
            return self._waiting > 0 and not self._ended

    def _admit(self) -> float:
        """Lets the waiting users begin; returns the time."""
        with self._lock:
            self._open = True
            self._used_at = time.monotonic()
            self._admitted.notify_all()
            return self._used_at

    def _is_over(self, began: float) -> bool:
        """True if the turn may end: all that waited for it have begun, and it has lasted long enough or is idle."""
        with self._lock:
            now = time.monotonic()
            is_idle = not self._users and now - self._used_at >= self._idle_s
            return not self._waiting and (is_idle or now - began >= self._turn_s)

    def _is_wanted(self) -> bool:
        """True if another process waits for its turn, or if the files were replaced."""
        if not self._are_files_there():
            return True
        try:
            fcntl.flock(self._next, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._next, fcntl.LOCK_UN)
        return False


def _make_own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner != os.getuid():
        raise SetupError(
            f"{folder} belongs to user {owner}, not to {os.getuid()}, so the trainer and the sampler cannot take turns "
            "there; remove it, or set engine.handover_dir to another folder"
        )


@contextmanager
def _reported(text: str) -> Iterator[None]:
    """Logs a warning once, if the block takes long."""
    timer = threading.Timer(_LONG_S, log.warning, [text, _LONG_S])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class TrainerInTurns:
    """A TrainingBackend that uses its GPUs in turns, and frees what it does not keep between them.

    `capture` copies to host memory and `close` frees, so these two wait for no turn. Several ranks gather on the GPU
    what they copy; it is freed at once.
    """

    def __init__(self, backend: TrainingBackend, file: Path, deadline_s: float, turn_s: float = _TURN_S) -> None:
        self._backend = backend
        self._calls = threading.Lock()
        """A backend takes one call at a time, and a turn ends in another thread."""
        self.turns = GpuTurns(file, lambda: None, self._leave, deadline_s, turn_s, _TRAINER_IDLE_S)

    def open(self) -> BaseModelInfo:
        with self.turns.use(), _closed_on_failure(self.turns):
            return self._backend.open()

    def apply(self, ops: Mapping[str, BackendOp]) -> Mapping[str, Output | OpError]:
        with self.turns.use(), self._calls:
            return self._backend.apply(ops)

    def capture(self, model_id: str, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
        with self._calls:
            writer = self._backend.capture(model_id, optimizer=optimizer, gradients=gradients, rounded=rounded)
            if not self.turns.held:
                self._backend.free_memory()
            return writer

    def export(self, model_id: str) -> Writer:
        with self.turns.use(), self._calls:
            return self._backend.export(model_id)

    def close(self, model_id: str) -> None:
        with self._calls:
            self._backend.close(model_id)

    def free_memory(self) -> None:
        with self._calls:
            self._backend.free_memory()

    def _leave(self) -> None:
        """Frees memory. Raises RuntimeError when a backend that has failed may have kept it."""
        self.free_memory()
        if not self._backend.healthy():
            raise RuntimeError("the trainer has failed and may have freed no memory, so it keeps its turn")

    def healthy(self) -> bool:
        return self._backend.healthy() and self.turns.healthy()

    def follow(self) -> None:
        self._backend.follow()

    def shutdown(self) -> None:
        self.turns.close()
        with self._calls:
            self._backend.shutdown()

    def describe(self) -> Mapping[str, Any]:
        return self._backend.describe()


class SamplerInTurns:
    """A SamplerBackend that uses its GPUs in turns, and sleeps between them.

    A sleeping engine cannot drop an adapter, so `evict` waits for the next load. Nobody waits for it.
    """

    def __init__(self, backend: VllmSampler, file: Path, deadline_s: float, turn_s: float = _TURN_S) -> None:
        self._backend = backend
        self._unwanted: list[str] = []
        self._evicting = threading.Lock()
        self.turns = GpuTurns(file, backend.wake, backend.sleep, deadline_s, turn_s)

    def open(self) -> BaseModelInfo:
        with self.turns.use(), _closed_on_failure(self.turns):
            return self._backend.open()

    @property
    def batch(self) -> int:
        return self._backend.batch

    @property
    def adapter_capacity(self) -> int:
        return self._backend.adapter_capacity

    def load(self, adapter_id: str, folder: Path) -> None:
        with self.turns.use():
            with self._evicting:
                while self._unwanted:
                    self._backend.evict(self._unwanted.pop())
            self._backend.load(adapter_id, folder)

    def evict(self, adapter_id: str) -> None:
        with self._evicting:
            self._unwanted.append(adapter_id)

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        with self.turns.use(handle):
            return self._backend.sample(adapter_id, request, handle)

    def healthy(self) -> bool:
        return self._backend.healthy() and self.turns.healthy()

    def close(self) -> None:
        self.turns.close()
        self._backend.close()

    def describe(self) -> Mapping[str, Any]:
        return self._backend.describe()


@contextmanager
def _closed_on_failure(turns: GpuTurns) -> Iterator[None]:
    """Keeps the turn of a backend that could not start: its process ends, and it can neither sleep nor free memory."""
    try:
        yield
    except BaseException:
        turns.close()
        raise
