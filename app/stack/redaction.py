"""Hides secrets: those of this process's command line, which every local user can read (`ps`), and those of URLs."""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from urllib.parse import urlsplit

# Fields 48 and 49 of /proc/self/stat (proc(5)), counted from the third, which follows the command's name.
_ARGUMENTS = slice(45, 47)


def hide_secrets(given: argparse.Namespace) -> None:
    """Overwrites the API key and the passwords of servers' URLs with x. They stay visible for the time of Python's own
    start, a tenth of a second: an environment variable or a file is better."""
    options = vars(given)
    passwords = [secret for name in ("redis", "s3") for secret in _passwords(options.get(name) or "")]
    for secret in filter(None, [options.get("api_key"), *passwords]):
        _overwrite(secret.encode())


def without_secrets(url: str) -> str:
    """The URL without user, password and options: a password may be one of these."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _passwords(url: str) -> list[str]:
    """The passwords in a URL, as they are written there; none in what is not a URL, which ends the command."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    options = (option.partition("=") for option in parts.query.split("&"))
    return [parts.password or "", *(value for name, _, value in options if name.endswith("password"))]


def _overwrite(secret: bytes) -> None:
    start, end = map(int, Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[_ARGUMENTS])
    text = ctypes.string_at(start, end - start)
    found = text.find(secret)
    while found >= 0:
        ctypes.memset(start + found, ord("x"), len(secret))
        found = text.find(secret, found + len(secret))
