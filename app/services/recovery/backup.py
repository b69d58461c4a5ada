"""Backups of the objects that no manifest can replace: accounts and ledgers.

A backup file has one JSON text per line: a head, one line per object, and last the number of objects. The last line
shows that the file was not cut short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from app.errors import BadRequest, SetupError
from app.stores.objects import accounts
from app.stores.objects.base import ObjectStore, check_key
from app.stores.pages import LEDGERS

ROOTS = (accounts.ROOT, *LEDGERS)
_HEAD = {"tinsmith": "backup", "version": 1}


def backup_lines(objects: ObjectStore) -> Iterator[str]:
    """The lines of a backup. Raises Unavailable while the store is away, and SetupError for a damaged object."""
    yield json.dumps(_HEAD)
    keys = [key for root in ROOTS for key in objects.list(f"{root}/")]
    for key in keys:
        try:
            content = objects.read(key).decode()
        except UnicodeDecodeError:
            raise SetupError(
                f"{key} in the object store is damaged: restore it from an earlier backup, or delete it"
            ) from None
        yield json.dumps({"key": key, "content": content})
    yield json.dumps({"objects": len(keys)})


def check_backup(backup: Iterable[str]) -> int:
    """The number of objects in the backup. Raises BadRequest, naming the line, for anything that `backup_lines` did not
    write."""
    rest = enumerate(backup, 1)
    if _parsed(next(rest, (1, ""))[1]) != _HEAD:
        raise BadRequest("line 1 is not the header of a backup of this version")
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
    raise BadRequest(f"the file ends after {count} objects, before its last line: it was cut short")


def restore_backup(backup: Iterable[str], objects: ObjectStore) -> int:
    """Stores the objects of a checked backup that are missing, and returns their number. Existing objects never
    change."""
    found = (_parsed(text) for text in backup)
    return sum(objects.put_new(each["key"], each["content"].encode()) for each in found if "key" in each)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
