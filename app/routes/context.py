"""What a view takes from the request at hand: the services, and a blueprint under the API's prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from flask import current_app
from flask_smorest import Blueprint
from marshmallow import Schema

from app.routes.bodies import JsonParser
from app.services.container import Services

EXTENSION = "tinsmith"
View = TypeVar("View", bound=Callable[..., Any])


class Resource(Protocol):
    """flask-smorest's Blueprint, which comes without types."""

    def route(self, rule: str, *, methods: Sequence[str]) -> Callable[[View], View]: ...

    def arguments(
        self, schema: Schema, *, location: str = "json", error_status_code: int = 422
    ) -> Callable[[View], View]: ...

    def response(self, status: int, schema: type | Schema | None = None, **options: Any) -> Callable[[View], View]: ...

    def alt_response(self, status: int, **options: Any) -> Callable[[View], View]: ...

    def doc(self, **options: Any) -> Callable[[View], View]: ...


class _Blueprint(Blueprint):  # type: ignore[misc]
    """flask-smorest's, reading bodies within their limits."""

    ARGUMENTS_PARSER = JsonParser()


def services() -> Services:
    """Those of the application that serves this request."""
    found: Services = current_app.extensions[EXTENSION]
    return found


def blueprint(name: str, description: str, prefix: str = "/api/v1") -> Resource:
    """A blueprint whose routes are below `prefix`."""
    made: Resource = _Blueprint(name, f"app.routes.{name}", url_prefix=prefix, description=description)
    return made
