"""Which keys are allowed: the same ones for every store, so that moving from a folder to S3 never fails on a name."""

from __future__ import annotations

import re

from app.errors import BadRequest

# S3 allows 1,024 bytes; the rest is left for the store's own folder.
_LONGEST = 900
# A leading dot is refused, which covers "." and ".." and keeps the folder store's own files out of reach.
_PART = re.compile(r"[A-Za-z0-9_:=@+-][A-Za-z0-9_:=@+.-]{0,254}")


def check_key(key: str) -> str:
    """The key, unchanged. Raises BadRequest when a part is empty, starts with a dot or holds another character."""
    if len(key) <= _LONGEST and all(_PART.fullmatch(part) for part in key.split("/")):
        return key
    raise BadRequest(
        f"{key[:200]!r} is not an object key: use up to {_LONGEST} characters in parts joined by '/', "
        "each of letters, digits and _:=@+-. and not starting with '.'"
    )


def check_prefix(prefix: str) -> str:
    """The prefix, unchanged. Raises BadRequest when no key could start with it; empty means every key."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix
