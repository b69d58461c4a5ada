"""Another tenant's resource and a missing one give the same answer, byte for byte, on every route of the URL map."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import redis
from werkzeug.test import TestResponse

from app.api import errors
from app.stores.redis.client import connect
from app.web import PUBLIC
from tests.fuzz.test_odd_values import BATCH, bodies
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import API, BASE, KEY, Api

OPENAI, ANTHROPICS = "/oai/api/v1", ("/anthropic/api/v1", "/anthropic/v1")
OF_CONNECTIONS = {"HELLO", "CLIENT", "PING", "PUBLISH"}
"""Commands by which a client opens a connection, and the one by which a thread sends the task events of earlier calls.
Calls themselves publish in scripts."""
NO_IDS = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/create_session",
    "POST /api/v1/external_weights_upload_start",
    "GET /api/v1/get_server_capabilities",
    "GET /oai/api/v1/models",
    "GET /anthropic/api/v1/models",
    "GET /anthropic/v1/models",
    "GET /api/v1/training_runs",
    "GET /api/v1/checkpoints",
    "GET /api/v1/sessions",
    "POST /api/v1/sessions/search",
    "POST /api/v1/checkpoints/search",
    "POST /api/v1/auth/token",
    "GET /api/v1/auth/apikey/me",
    "GET /api/v1/queue",
    "DELETE /api/v1/auth/apikey/me",
    "GET /api/v1/limits",
    "GET /api/v1/audit",
    "GET /api/v1/captures",
    "DELETE /api/v1/captures",
    "GET /api/v1/billing/usage/events",
    "GET /api/v1/billing/usage/runs",
    "GET /api/v1/billing/usage/checkpoints/current",
}
"""They take no id, or none that is looked up; what they list is the caller's own."""


@pytest.fixture(autouse=True)
def equal_request_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's clients get a random id with each error; it says nothing of what was asked."""
    monkeypatch.setattr(errors, "new_request_id", lambda: "req_1")


@dataclass(frozen=True)
class Call:
    """A request with every id that a caller can name; `names` are path parts."""

    body: dict[str, Any] | None
    names: dict[str, str]


def calls(api: Api) -> dict[str, Call]:
    """One call for every "METHOD rule" that takes ids, all of them this caller's own."""
    made = bodies(api)
    session = made["session_heartbeat"]["session_id"]
    model = made["get_info"]["model_id"]
    external = save_checkpoint(api, model, "external_weights").split("/")[-1]
    sampler = api.sampler()
    of_run = {"run": model}
    of_checkpoint = {**of_run, "kind": "external_weights", "name": external}
    checkpoint = "/api/v1/training_runs/<run>/checkpoints/<kind>/<name>"
    creation = {"session_id": session, "model_seq_id": 8, "path": made["load_weights"]["path"]}
    target = {"target": {"sampling_session_id": sampler}, "timeout": 0}
    sampled = {"model": save_checkpoint(api, model, "sampler_weights")}
    chat = {**sampled, "messages": [{"role": "user", "content": "a"}]}
    loss = api.post("create_custom_loss", made["create_custom_loss"]).json["request_id"]
    custom = copy.deepcopy(made["forward_backward"])
    custom["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss}}
    rows = {f"POST /api/v1/{path}": Call(body, {}) for path, body in made.items() if "/" not in path}
    del rows["POST /api/v1/create_session"], rows["POST /api/v1/external_weights_upload_start"]
    return rows | {
        "POST /api/v1/sessions/<session_id>/finish": Call({"reason": {"type": "success"}}, {"session_id": session}),
        "POST /api/v1/forward_backward#custom": Call(custom, {}),
        "POST /api/v1/forward": Call({"model_id": model, "seq_id": 1, "forward_input": BATCH}, {}),
        "POST /api/v1/unload_model": Call({"model_id": model}, {}),
        f"GET {checkpoint}/archive": Call(None, of_checkpoint),
        f"POST {checkpoint}/publish": Call(None, of_checkpoint),
        f"DELETE {checkpoint}/publish": Call(None, of_checkpoint),
        "POST /api/v1/weights_info": Call({"tinker_path": creation["path"]}, {}),
        "POST /api/v1/copy_weights": Call({**creation, "path": "", "source_path": creation["path"]}, {}),
        "GET /api/v1/sessions/<session_id>": Call(None, {"session_id": session}),
        "GET /api/v1/sessions/<session_id>/trace_export": Call(None, {"session_id": session}),
        "PUT /api/v1/sessions/<session_id>/project": Call({"project_id": "x"}, {"session_id": session}),
        "POST /api/v1/load_weights#new": Call(creation, {}),
        "POST /api/v1/retrieve_futures": Call(target, {}),
        "POST /api/v1/cancel_future": Call({"request_id": f"{model}:0"}, {}),
        "DELETE /api/v1/queue/<request_id>": Call(None, {"request_id": f"{model}:0"}),
        "POST /api/v1/join_sampling_session": Call({"sampling_session_id": sampler}, {}),
        "GET /api/v1/samplers/<sampler_id>": Call(None, {"sampler_id": sampler}),
        "GET /api/v1/training_runs/<run>": Call(None, of_run),
        "DELETE /api/v1/training_runs/<run>": Call(None, of_run),
        "GET /api/v1/training_runs/<run>/checkpoints": Call(None, of_run),
        f"PUT {checkpoint}/ttl": Call({"ttl_seconds": 7200}, of_checkpoint),
        f"DELETE {checkpoint}": Call(None, of_checkpoint),
        f"GET {checkpoint}/external_weights_urls": Call(None, of_checkpoint),
        f"GET {OPENAI}/models/<path:model>": Call(None, {"path:model": sampled["model"]}),
        f"POST {OPENAI}/completions": Call({**sampled, "prompt": "a"}, {}),
        f"POST {OPENAI}/chat/completions": Call(chat, {}),
        **{f"GET {prefix}/models/<path:model>": Call(None, {"path:model": sampled["model"]}) for prefix in ANTHROPICS},
        **{f"POST {prefix}/messages": Call({**chat, "max_tokens": 5}, {}) for prefix in ANTHROPICS},
        **{f"POST {prefix}/messages/count_tokens": Call(chat, {}) for prefix in ANTHROPICS},
    }


def rules(api: Api) -> set[str]:
    """Every "METHOD rule" that needs a key."""
    found = [
        rule
        for rule in api.client.application.url_map.iter_rules()
        if PUBLIC.isdisjoint((rule.endpoint, rule.endpoint.partition(".")[0]))
    ]
    return {f"{method} {rule.rule}" for rule in found for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}}


def test_every_route_has_a_row(api: Api) -> None:
    rows = {label.partition("#")[0] for label in calls(api)}
    assert rules(api) == rows | NO_IDS, "add the route to calls() with its ids, or to NO_IDS if it takes none"


def test_what_is_somebody_elses_is_as_if_it_were_not_there(api: Api, stranger: Api, state_url: str) -> None:
    theirs, own = calls(api), calls(stranger)
    session = theirs["POST /api/v1/session_heartbeat"].body["session_id"]
    mixed = [(label, call) for label in theirs for call in _mixed(own[label], theirs[label])]
    foreign = [ask(stranger, label, call) for label, call in mixed]
    with connect(state_url) as client:
        others = {_session_of(text) for call in theirs.values() for text in _texts([call.body, call.names])} | {session}
        for key in [key for other in filter(None, others) for key in client.scan_iter(f"*{other}*")]:
            client.delete(key)
    for (label, call), before in zip(mixed, foreign, strict=True):
        missing = ask(stranger, label, call)
        assert (before.status_code, before.data) == (missing.status_code, missing.data), (label, call)
        # A call on the caller's own model with another's checkpoint is final, so that no later call waits for its seq.
        assert before.status_code == 404 or (before.status_code == 400 and b"does not exist" in before.data), label
    assert {label for label, _ in mixed} == theirs.keys(), "a row without a foreign id shows nothing"


def test_what_is_somebody_elses_takes_the_time_of_what_never_was(api: Api, stranger: Api, state_url: str) -> None:
    """Time is counted in commands that the state server gets: each is a round trip. The second of two equal calls
    counts, because the first one may use up a seq."""
    theirs, own = calls(api), calls(stranger)
    texts = [text for call in theirs.values() for text in _texts([call.body, call.names])]
    unknown = {session: str(uuid.uuid4()) for session in filter(None, map(_session_of, texts))}
    with connect(state_url) as client:
        mixed = [(label, call) for label in theirs for call in _mixed(own[label], theirs[label])]
        for label, foreign in mixed:
            missing = Call(*(_renamed(part, unknown) for part in (foreign.body, foreign.names)))
            taken = []
            for call in (foreign, missing):
                ask(stranger, label, call)
                taken.append(_commands(client, partial(ask, stranger, label, call)))
            (answer, commands), (of_missing, commands_of_missing) = taken
            said = _renamed(answer.text, unknown)
            assert (answer.status_code, said) == (of_missing.status_code, of_missing.text), label
            assert commands == commands_of_missing, label


def of_projects(caller: Api, project: str) -> dict[str, dict[str, Any] | None]:
    """A call for each "METHOD path" that takes a project, all else in it the caller's own."""
    session, path = caller.session(), save_checkpoint(caller, caller.model())
    return {
        "POST create_session": {"project_id": project},
        f"PUT sessions/{session}/project": {"project_id": project},
        "POST sessions/search": {"project_ids": [project]},
        "POST checkpoints/search": {"project_ids": [project]},
        "POST copy_weights": {"source_path": path, "destination_project_id": project},
        "POST external_weights_upload_start": {
            "base_model": BASE,
            "lora_config": {"rank": 4},
            "destination_project_id": project,
        },
        f"GET training_runs?project_id={project}": None,
        f"GET limits?project_id={project}": None,
        f"GET billing/usage/checkpoints/current?project_id={project}": None,
    }


def test_a_project_of_somebody_else_is_as_if_it_were_not_there(api: Api, stranger: Api, state_url: str) -> None:
    project = api.services.records.get("sessions", api.session())["owner"].strip('"')
    unknown = "0" * len(project)
    with connect(state_url) as client:
        for label, body in of_projects(stranger, project).items():
            (foreign, commands), (missing, of_missing) = (
                _commands(client, partial(ask, stranger, f"{method} {API}/{path}", Call(asked, {})))
                for method, path, asked in (
                    [*label.split(), body],
                    [*label.replace(project, unknown).split(), _renamed(body, {project: unknown})],
                )
            )
            assert foreign.status_code == missing.status_code == 404, label
            assert foreign.text.replace(project, unknown) == missing.text, label
            assert commands == of_missing, label


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "tml-revoked"}, {"Authorization": f"Basic {KEY}"}], ids=repr)
def test_without_a_valid_key_every_route_says_the_same_of_everything(api: Api, headers: dict[str, str]) -> None:
    for label, call in calls(api).items():
        path, method = path_of(label, call.names), label.split()[0]
        answer = api.client.open(path, method=method, json=call.body, headers=headers)
        unknown = api.client.open(
            path_of(label, dict.fromkeys(call.names, "x")), method=method, json={}, headers=headers
        )
        assert (answer.status_code, answer.data) == (401, unknown.data), label


def _mixed(own: Call, theirs: Call) -> Iterator[Call]:
    """The caller's own call with one foreign id in it, for each id it has; names belong together."""
    if theirs.names:
        yield Call(own.body, theirs.names)
    for place, text in _leaves(theirs.body or {}):
        if _session_of(text):
            body = copy.deepcopy(own.body)
            inner: Any = body
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = text
            yield Call(body, own.names)


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield place, value
    for key, part in items or ():
        yield from _leaves(part, (*place, key))


def _commands(client: redis.Redis, make_call: Callable[[], TestResponse]) -> tuple[TestResponse, list[str]]:
    """The answer of a call, and the commands that the state server got for it: names, and which script."""
    end = f"end-{uuid.uuid4()}"
    with client.monitor() as monitor:
        answer = make_call()
        client.echo(end)
        seen: list[str] = []
        while end not in (command := monitor.next_command())["command"]:
            name, *rest = command["command"].split()
            if command["client_type"] != "lua" and name not in OF_CONNECTIONS:
                seen.append(f"{name} {rest[0]}" if name == "EVALSHA" else name)
    return answer, seen


def _renamed(value: Any, sessions: dict[str, str]) -> Any:
    """The JSON value with other session ids in it."""
    text = json.dumps(value)
    for id_, other in sessions.items():
        text = text.replace(id_, other)
    return json.loads(text)


def _texts(value: Any) -> Iterator[str]:
    return (leaf for _, leaf in _leaves(value) if isinstance(leaf, str))


def _session_of(text: Any) -> str:
    """The session that every id begins with, as a uuid; empty for other strings."""
    head = text.removeprefix("tinker://").partition(":")[0] if isinstance(text, str) else ""
    return head if len(head) == 36 and head.count("-") == 4 else ""


def ask(who: Api, label: str, call: Call) -> TestResponse:
    return who.client.open(
        path_of(label, call.names), method=label.split()[0], json=call.body, headers={"X-API-Key": who.key}
    )


def path_of(label: str, names: dict[str, str]) -> str:
    path = label.partition("#")[0].split()[1]
    for name, value in names.items():
        path = path.replace(f"<{name}>", value)
    assert path.startswith((API, OPENAI, *ANTHROPICS))
    return path
