"""What nothing but the object store knows, and no file there can bring back: written to one file, and read from it.

One JSON text a line: a head, an object each, and last how many there were, so that a file that was cut short is told
from a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from app.errors import BadRequest
from app.stores.interfaces import ObjectStore
from app.stores.objects import accounts
from app.stores.objects.keys import check_key
from app.stores.pages import BOOKS

ROOTS = (accounts.ROOT, *BOOKS)
_HEAD = {"tinsmith": "backup", "version": 1}


def lines(objects: ObjectStore) -> Iterator[str]:
    """A backup's lines. Raises Unavailable while the store is away."""
    yield json.dumps(_HEAD)
    keys = [key for root in ROOTS for key in objects.list(f"{root}/")]
    for key in keys:
        yield json.dumps({"key": key, "content": objects.read(key).decode()})
    yield json.dumps({"objects": len(keys)})


def check(backup: Iterable[str]) -> int:
    """How many objects it holds. Raises BadRequest, naming the line, for what `lines` did not write."""
    rest = enumerate(backup, 1)
    if _parsed(next(rest, (1, ""))[1]) != _HEAD:
        raise BadRequest("line 1 is not the head of a backup of this version")
    count = 0
    for number, text in rest:
        found = _parsed(text)
        if found == {"objects": count}:
            return count
        if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in ("key", "content")):
            raise BadRequest(f"line {number} is damaged")
        if check_key(found["key"]).split("/")[0] not in ROOTS:
            raise BadRequest(f"line {number} holds {found['key']!r}, which is not in a backup")
        count += 1
    raise BadRequest(f"it ends after {count} objects, before its last line: the file was cut short")


def restore(backup: Iterable[str], objects: ObjectStore) -> int:
    """Store what is not there, of a checked backup; how many that were. What is there is never changed."""
    found = (_parsed(text) for text in backup)
    return sum(objects.put_new(each["key"], each["content"].encode()) for each in found if "key" in each)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
