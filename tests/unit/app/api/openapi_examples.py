"""The examples in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from app.web import openapi


class Shown(NamedTuple):
    """A call's example: the body that it sends, None for a GET, and its answers by status."""

    request: Any
    responses: dict[str, Any]


def _shown(operation: Mapping[str, Any]) -> Shown:
    answers = {status: _of(answer) for status, answer in operation["responses"].items()}
    return Shown(_of(operation.get("requestBody", {})), {status: body for status, body in answers.items() if body})


def _of(part: Mapping[str, Any]) -> Any:
    return part.get("content", {}).get("application/json", {}).get("example")


def _all() -> Iterator[tuple[str, Shown]]:
    for path, methods in openapi()["paths"].items():
        for method in methods.keys() - {"parameters"}:
            shown = _shown(methods[method])
            if shown.request or shown.responses:
                yield path, shown


EXAMPLES = dict(_all())
"""Examples by path; no path has two."""
