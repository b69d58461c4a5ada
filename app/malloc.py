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
    """Makes all threads share two arenas; call it before any thread starts.

    glibc gives threads that run at the same time an arena each, up to eight a core, and an arena keeps what it once
    held. A trainer's interpreter has a table of 7.7 MB for its interned strings. Every few minutes it is made anew, in
    the arena of the thread that adds a string, and so 8 to 15 MB stayed in one arena after the other.
    """
    _set(_ARENA_MAX, 2)


def _set(parameter: int, value: int) -> None:
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(parameter, value)
