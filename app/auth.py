"""Who is calling: an API key, known by its sha256."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from flask import g
from werkzeug.datastructures import Headers

from app.domain.identity import Caller, Scope
from app.errors import Forbidden, Unauthorized
from app.settings import hash_key

_PROJECT_DIGITS = 16
View = TypeVar("View", bound=Callable[..., Any])


def authenticate(headers: Headers, digests: Sequence[str]) -> Caller:
    """Who is behind the key in X-API-Key or `Authorization: Bearer`.

    A key of the settings is a project of its own, whose id is a prefix of the key's digest. Raises Unauthorized. Every
    known digest is compared, in constant time.
    """
    key = headers.get("X-API-Key") or headers.get("Authorization", "").removeprefix("Bearer ")
    if not key:
        raise Unauthorized("no API key: send it in the X-API-Key header, or as `Authorization: Bearer`")
    digest = hash_key(key)
    if sum(hmac.compare_digest(digest, known) for known in digests) == 0:
        raise Unauthorized("this API key is not known here")
    return Caller.alone(digest[:_PROJECT_DIGITS])


def current_caller() -> Caller:
    """The caller of the request at hand."""
    caller: Caller = g.caller
    return caller


def needs(*scopes: Scope) -> Callable[[View], View]:
    """Goes right below the route of whatever changes something: a key must have one of the scopes. Raises Forbidden."""

    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if current_caller().scopes.isdisjoint(scopes):
                raise Forbidden(f"this key may not do this: it takes a key with the scope {' or '.join(scopes)}")
            return view(*args, **kwargs)

        wrapped.scopes = scopes  # type: ignore[attr-defined]
        return cast(View, wrapped)

    return decorate
