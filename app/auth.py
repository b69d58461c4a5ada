"""Who is calling, and whether the key may do what it asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from flask import g
from werkzeug.datastructures import Headers

from app.domain.identity import Caller, Scope
from app.errors import Forbidden, Unauthorized

View = TypeVar("View", bound=Callable[..., Any])


def credential(headers: Headers) -> str:
    """The key or token in X-API-Key or `Authorization: Bearer`. Raises Unauthorized where there is none."""
    found = headers.get("X-API-Key") or headers.get("Authorization", "").removeprefix("Bearer ")
    if not found:
        raise Unauthorized("no API key: send it in the X-API-Key header, or as `Authorization: Bearer`")
    return found


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
