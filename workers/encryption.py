"""Files for their recipients' eyes alone, in the age format (age-encryption.org): `age -d` reads them anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyrage

from app.domain.records import ENCRYPTED


def encrypt(folder: Path, recipients: Iterable[str]) -> None:
    """Every file of `folder` becomes `<name>.age`, which each of `recipients` (public keys, checked before) can read.

    Raises OSError when the disk is full, which pyrage's own `encrypt_file` would not notice.
    """
    keys = [pyrage.x25519.Recipient.from_str(recipient) for recipient in recipients]
    for source in sorted(folder.iterdir()):
        with source.open("rb") as data, source.with_name(source.name + ENCRYPTED).open("wb") as target:
            pyrage.encrypt_io(data, target, keys)
        source.unlink()
