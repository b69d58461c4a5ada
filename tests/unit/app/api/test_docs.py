"""The page at /docs, and the words of openapi.json that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask

from app.api.errors import TinsmithApi
from app.web import openapi
from tests.unit.app.api.test_auth import PUBLIC as PUBLIC_RULES
from tests.unit.app.conftest import Api

PATHS = openapi()["paths"]


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operation by its method and path, with the parameters of its path."""
    for path, methods in PATHS.items():
        for method, operation in methods.items():
            if method != "parameters":
                parameters = [*methods.get("parameters", ()), *operation.get("parameters", ())]
                yield f"{method} {path}", {**operation, "parameters": parameters}


def test_the_page_and_all_that_it_loads_come_from_this_server(api: Api) -> None:
    page = api.client.get("/docs")
    assert (page.status_code, page.mimetype) == (200, "text/html")
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(loaded) == 4
    for path in loaded:
        asset = api.client.get(f"/{path}")
        assert (path, asset.status_code) == (path, 200)
        assert asset.content_length
    assert b"SwaggerUIBundle" in api.client.get("/docs/swagger-ui-bundle.js").data
    assert "://" not in page.text + api.client.get("/docs/start.js").text


def test_a_browser_lets_the_page_reach_nothing_but_this_server(api: Api) -> None:
    policy = dict(part.split(" ", 1) for part in api.client.get("/docs").headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "connect-src")} == {"'self'"}
    assert policy["img-src"] == "'self' data:"
    assert "<script>" not in api.client.get("/docs").text, "the policy forbids it"


@pytest.mark.parametrize("name", ["oauth2-redirect.html", "index.j2"])
def test_only_the_files_that_the_page_loads_are_served(api: Api, name: str) -> None:
    assert api.client.get(f"/docs/{name}").status_code == 404


def test_every_route_has_a_summary_and_is_in_one_group_that_says_what_it_is_for() -> None:
    described = {tag["name"] for tag in openapi()["tags"] if tag["description"]}
    used = set()
    for name, operation in operations():
        assert operation["summary"], name
        (group,) = operation["tags"]
        used.add(group)
    assert used == described


def test_every_parameter_of_a_path_or_a_query_is_described() -> None:
    undescribed = [
        (name, parameter["name"])
        for name, operation in operations()
        for parameter in operation["parameters"]
        if not parameter.get("description")
    ]
    assert undescribed == []


def test_every_parameter_in_a_path_is_listed() -> None:
    for name, operation in operations():
        listed = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
        assert listed == re.findall(r"{(\w+)}", name)


def test_a_call_is_tried_with_a_key_unless_it_needs_none(api: Api) -> None:
    (scheme,) = openapi()["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["in"], scheme["name"]) == ("apiKey", "header", "X-API-Key")
    assert [list(needed) for needed in openapi()["security"]] == [["key"]]
    without = {name.split(" ")[1] for name, operation in operations() if operation.get("security") == []}
    assert without == {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule) for rule in PUBLIC_RULES} & PATHS.keys()


def test_the_document_is_the_same_on_a_python_that_renamed_a_status() -> None:
    app = Flask("app")
    app.config.update(API_TITLE="Tinsmith", API_VERSION="v1", OPENAPI_VERSION="3.0.3")
    api = TinsmithApi(app)
    api.spec.components.response("UNPROCESSABLE_CONTENT", {"description": "Unprocessable Content"})
    responses = {"UNPROCESSABLE_ENTITY": {"description": "Unprocessable Entity"}}
    assert api.document()["components"]["responses"] == responses
