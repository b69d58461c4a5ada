"""Who is calling: an API key, known by its sha256."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from flask import g
from werkzeug.datastructures import Headers

from app.errors import Unauthorized
from app.settings import hash_key

_OWNER_DIGITS = 16


def authenticate(headers: Headers, digests: Sequence[str]) -> str:
    """The owner behind the key in X-API-Key or `Authorization: Bearer`: a prefix of its digest.

    Raises Unauthorized. Every known digest is compared, in constant time.
    """
    key = headers.get("X-API-Key") or headers.get("Authorization", "").removeprefix("Bearer ")
    if not key:
        raise Unauthorized("no API key: send it in the X-API-Key header, or as `Authorization: Bearer`")
    digest = hash_key(key)
    if sum(hmac.compare_digest(digest, known) for known in digests) == 0:
        raise Unauthorized("this API key is not known here")
    return digest[:_OWNER_DIGITS]


def current_owner() -> str:
    """The owner of the request at hand."""
    owner: str = g.owner
    return owner
