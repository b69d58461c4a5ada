"""Parameters of glibc's malloc, for the life of the process. Another C library has none, and nothing happens."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
_libc = ctypes.CDLL(None)


def give_large_blocks_back() -> None:
    """Makes every block of more than 1 MiB go back to the system when it is freed.

    glibc raises this limit to the size of each large block that it frees, and then every thread's arena keeps up to
    twice as much: 50 MiB stayed in the API after a few bodies of 16 MiB.
    """
    _set(_MMAP_THRESHOLD, 2**20)


def share_arenas() -> None:
    """Makes all threads share four arenas; call it before any thread starts.

    glibc gives threads that run at the same time an arena each, up to eight times the cores, and each keeps what its
    threads once needed: a trainer's saves some 8 MB each.
    """
    _set(_ARENA_MAX, 4)


def _set(parameter: int, value: int) -> None:
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(parameter, value)
