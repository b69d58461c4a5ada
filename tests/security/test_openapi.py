"""docs/openapi.json describes the API: every change of a route or a schema must appear there."""

from __future__ import annotations

import json

from ops.openapi import PATH, text
from tests.unit.app.conftest import Api


def test_the_file_in_the_repository_is_what_the_routes_say() -> None:
    assert PATH.read_text() == text(), "run `make openapi` and commit docs/openapi.json"


def test_an_installation_serves_that_file(api: Api) -> None:
    assert api.client.get("/openapi.json").json == json.loads(PATH.read_text())
