"""Accounts in the object store, their durable place: `accounts/<kind>/<id>/<version>.json`.

The highest version counts. An object never changes, so each change writes a new version. Of two changes at the same
time only one succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from app.domain.accounts import ACCOUNTS, Account
from app.errors import NotFound, SetupError
from app.stores.objects.base import ObjectStore

ROOT = "accounts"
# Fields that earlier versions do not write are left out while they have their default.
_ADDED = {"only_project": False}
A = TypeVar("A", bound=Account)


class AccountFiles:
    """Reads and writes the versions of accounts. Every method raises Unavailable while the object store is away."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def add(self, account: Account) -> bool:
        """Stores a version; False (nothing changes) when a version with that number exists."""
        key = f"{_folder(account.namespace, account.id)}{account.version:08d}.json"
        fields = {name: value for name, value in asdict(account).items() if name not in _ADDED or value != _ADDED[name]}
        return self._objects.put_new(key, json.dumps(fields).encode())

    def newest(self, cls: type[A], id_: str) -> A:
        """The newest version of an account. Raises NotFound, and SetupError when that version cannot be parsed."""
        keys = self._objects.list(_folder(cls.namespace, id_))
        if not keys:
            raise NotFound(f"there is no {cls.__name__.lower()} {id_!r}")
        try:
            return _parse(cls, self._objects.read(keys[-1]))
        except ValidationError:
            raise SetupError(f"{keys[-1]} in the object store is damaged: restore it from a backup") from None

    def all(self) -> Iterator[tuple[str, Account | None]]:
        """The newest version of each account, with its object's key; None for a version that cannot be parsed."""
        for cls in ACCOUNTS:
            newest = {key.rpartition("/")[0]: key for key in self._objects.list(f"{ROOT}/{cls.namespace}/")}
            for key in newest.values():
                try:
                    account = _parse(cls, self._objects.read(key))
                except ValidationError:
                    account = None
                yield key, account


def _folder(namespace: str, id_: str) -> str:
    return f"{ROOT}/{namespace}/{id_}/"


def _parse(cls: type[A], content: bytes) -> A:
    return TypeAdapter(cls).validate_json(content)
