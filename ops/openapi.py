"""Writes docs/openapi.json, the description of the API: `make openapi`. A test compares the file with the routes."""

from __future__ import annotations

import json
from pathlib import Path

from app import web

PATH = Path(__file__).parents[1] / "docs" / "openapi.json"


def text() -> str:
    """The document as the file holds it."""
    return json.dumps(web.openapi(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
