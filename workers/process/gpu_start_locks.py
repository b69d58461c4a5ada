"""Locks of the GPUs on which a worker starts: a sampler starts alone, and trainers start beside each other.

vLLM compares the GPU's free memory at its start with that after a trial pass, and takes the difference for its own. So
another worker that moves its base model there meanwhile leaves it a smaller cache, or none: then vLLM does not start.

A lock is a `flock` on a file for each GPU, in a folder that all workers of a machine see. The kernel frees it when the
process dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from app.stack.hardware import NVIDIA_GPUS, by_name, nvidia_gpus, torch_is_for_cpus

log = logging.getLogger(__name__)
_POLL_S = 0.1
_WARN_S = 60
_NO_LOCK = "a worker may start on the same GPU meanwhile, and leave vLLM less memory: %s"


@contextmanager
def starting(folder: Path, gpus: Sequence[str], *, alone: bool) -> Iterator[None]:
    """Waits until no other process that is `alone` starts on one of the GPUs; if this one is, until none at all does.

    A worker whose files cannot be opened or locked starts without locks, and logs a warning. A wait of more than a
    minute is a warning, too.
    """
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with ExitStack() as closed_at_end:
        files = _opened(folder, gpus)
        for file in files:
            closed_at_end.callback(_close, file)
        _await(files, kind)
        yield


def visible(environ: Mapping[str, str], driver: Path = NVIDIA_GPUS) -> list[str]:
    """Returns the PCI addresses of the GPUs that a process sees: their numbers differ between containers.

    A name in CUDA_VISIBLE_DEVICES that is no known GPU's, such as a MIG slice's, stays. None beside a CPU build of
    torch.
    """
    if torch_is_for_cpus():
        return []
    gpus = nvidia_gpus(driver)
    if (listed := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [gpu.address for gpu in gpus]
    names = [name.strip() for name in listed.split(",")]
    return [gpu.address if (gpu := by_name(name, gpus)) else name for name in names if name]


def _opened(folder: Path, gpus: Sequence[str]) -> list[int]:
    files: list[int] = []
    try:
        for gpu in gpus:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():  # who could hold the locks for ever
                raise PermissionError(f"{folder} belongs to another user")
            file = folder / f"{gpu.replace('/', ',')}.start"
            files.append(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        log.warning(_NO_LOCK, error)
    return files


def _await(files: Sequence[int], kind: int) -> None:
    began = time.monotonic()
    warned = 0
    while not _locked(files, kind):
        waited = time.monotonic() - began
        if waited >= warned * _WARN_S:
            level = logging.WARNING if warned else logging.INFO
            log.log(level, "waiting for another worker that starts on the same GPU, for %d s", waited)
            warned += 1
        time.sleep(_POLL_S)


def _locked(files: Sequence[int], kind: int) -> bool:
    """Locks all files, or none: a process that waits for a GPU holds no other one."""
    for file in files:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            for each in files:
                _unlock(each)
            return False
        except OSError as error:  # a file system without locks
            log.warning(_NO_LOCK, error)
    return True


def _unlock(file: int) -> None:
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _close(file: int) -> None:
    """Unlocks and closes a file: a child that was forked meanwhile may have it too, and would keep the lock."""
    _unlock(file)
    os.close(file)
