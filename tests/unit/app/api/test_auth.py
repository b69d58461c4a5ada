from __future__ import annotations

import re

import pytest

from tests.logs import everything_logged
from tests.unit.app.conftest import API, KEY, Api, batch

COUNTS = {f"/anthropic/{path}/messages/count_tokens" for path in ("api/v1", "v1")}
UPLOADED = "/api/v1/uploads/<int:most_bytes>/<path:key>"
HUB = {
    "/<path:repo_id>/resolve/<revision>/<path:name>",
    "/api/models/<path:repo_id>",
    "/api/models/<path:repo_id>/revision/<revision>",
    "/api/models/<path:repo_id>/tree/<revision>",
    "/api/models/<path:repo_id>/tree/<revision>/<path:folder>",
}
PUBLIC = {
    "/",
    "/api/v1/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/docs/start.js",
    "/docs/<name>",
    "/api/v1/archives/<path:prefix>",
    "/api/v1/public_archives/<run>/<kind>/<name>",
    "/api/v1/objects/<path:key>",
    "/api/v1/sessions/<session_id>/trace",
    UPLOADED,
} | HUB

# Its pages have a login, and tests of their own: tests/unit/app/console/test_login.py.
CONSOLE = "/console"
# Other clients read other formats of errors.
FORMS = {"oai": {"error"}, "anthropic": {"type", "error", "request_id"}}

# No request to them changes a resource of a project; telemetry asks for a scope where it holds metrics.
READING = {
    f"{API}/{name}"
    for name in (
        "client/config",
        "client/dynamic_config",
        "telemetry",
        "auth/token",
        "auth/apikey/me",
        "get_info",
        "weights_info",
        "sessions/search",
        "checkpoints/search",
        "retrieve_future",
    )
}


def test_every_route_but_the_public_ones_wants_a_key(api: Api) -> None:
    tried = 0
    for rule in api.client.application.url_map.iter_rules():
        if rule.rule in PUBLIC or rule.rule.startswith(CONSOLE):
            continue
        path = rule.rule.replace("<", "").replace(">", "")
        method = min((rule.methods or set()) - {"HEAD", "OPTIONS"})
        answer = api.client.open(path, method=method, json={})
        assert (rule.rule, answer.status_code) == (rule.rule, 401)
        assert set(answer.json) == FORMS.get(path.split("/")[1], {"detail", "error"})
        tried += 1
    assert tried >= 20


def test_every_route_that_is_no_plain_read_says_which_scope_it_takes(api: Api) -> None:
    undeclared = {
        rule.rule
        for rule in api.client.application.url_map.iter_rules()
        if (rule.methods or set()) - {"GET", "HEAD", "OPTIONS"}
        and not rule.rule.startswith(CONSOLE)
        and not hasattr(api.client.application.view_functions[rule.endpoint], "scopes")
    }
    assert undeclared == READING | {UPLOADED} | COUNTS, (
        "put @needs(scope) below the route, or add a route that changes nothing to READING"
    )


@pytest.mark.parametrize("path", ["/api/v1/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"])
def test_operators_need_no_key(api: Api, path: str) -> None:
    assert api.client.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"X-API-Key": "tml-wrong"}, {"X-API-Key": ""}, {"Authorization": "Bearer tml-wrong"}, {"X-API-Key": "ü"}],
)
def test_a_wrong_key_is_refused(api: Api, headers: dict[str, str]) -> None:
    assert api.client.post(f"{API}/client/config", headers=headers, json={}).status_code == 401


def test_a_bearer_token_is_the_same_caller(api: Api) -> None:
    model = api.model()
    answer = api.client.post(f"{API}/get_info", headers={"Authorization": f"Bearer {KEY}"}, json={"model_id": model})
    assert answer.status_code == 200


def test_no_log_line_holds_a_key_or_tokens(api: Api) -> None:
    with everything_logged() as stream:
        model = api.model()
        api.forward_backward(batch(model, 1, tokens=[123, 124, 125]))
        api.post("telemetry", {"events": [{"headers": {"x-api-key": KEY}}]})
    lines = stream.getvalue()
    assert f'"request_id": "{model}:1"' in lines
    assert KEY not in lines
    assert not re.search(r"123\D{1,3}124", lines)
