"""A session's calls on a timeline, behind a link that needs no key and cannot be forged."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.domain.accounts import Caller
from app.domain.results import Result
from app.services.sessions import TraceService
from app.settings import Settings
from app.signing import UrlSigner
from app.stores.redis.backlog import RedisCalls
from app.stores.redis.client import connect
from tests.unit.app.api.test_futures import ask
from tests.unit.app.conftest import Api, batch


def link(api: Api, session: str) -> str:
    answer = api.get(f"sessions/{session}/trace_export").json
    assert answer["status"] == "ready"
    url = urlsplit(answer["url"])
    return f"{url.path}?{url.query}"


def events(api: Api, session: str) -> list[dict[str, Any]]:
    answer = api.client.get(link(api, session))
    assert answer.status_code == 200
    return answer.json["traceEvents"]


def test_every_call_of_a_run_is_there_from_its_admission_to_its_result(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    api.forward_backward(batch(model, 1))
    api.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    api.commit(model, 1, Result(b"{}"))
    found = events(api, session)
    assert [(event["ph"], event["name"]) for event in found] == [
        ("M", "process_name"),
        ("b", "create_model"),
        ("e", "create_model"),
        ("b", "forward_backward"),
        ("e", "forward_backward"),
        ("b", "optim_step"),
    ]
    begun = {event["id"]: event["ts"] for event in found if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in found if event["ph"] == "e"}
    now = api.services.records.now() * 1e6
    assert all(now - 60e6 < begun[id_] <= ended[id_] <= now for id_ in ended)
    assert [event["args"]["state"] for event in found if event["ph"] == "b"] == ["done", "done", "pending"]


def test_samples_that_run_or_were_not_read_are_there(api: Api) -> None:
    sampler = api.sampler()
    session = sampler.rpartition(":sample:")[0]
    running, ended = ask(api, sampler, 0), ask(api, sampler, 1)
    api.services.oplog.finish_sample(ended, Result(b"{}"))
    found = events(api, session)
    assert {event["id"] for event in found if event["ph"] == "b"} == {running, ended}
    assert {event["id"] for event in found if event["ph"] == "e"} == {ended}


def test_other_sessions_calls_and_no_content_are_in_it(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    api.forward_backward(batch(model, 1, tokens=[123, 124, 125]))
    other = api.model()
    text = json.dumps(events(api, session))
    assert model in text
    assert other not in text
    assert "123, 124" not in text


@pytest.mark.parametrize("how", ["another session", "another signature", "later", "none"])
def test_a_forged_link_is_refused(api: Api, how: str) -> None:
    session, other = api.session(), api.session()
    url = link(api, session)
    expires = url.partition("expires=")[2].partition("&")[0]
    forged = {
        "another session": url.replace(session, other),
        "another signature": url.replace("signature=", "signature=0"),
        "later": url.replace(expires, str(int(expires) + 1)),
        "none": url.partition("?")[0],
    }[how]
    assert api.client.get(forged).status_code == (422 if how == "none" else 403)


def test_a_link_to_a_trace_opens_no_object_and_one_to_an_object_no_trace(api: Api) -> None:
    session = api.session()
    query = link(api, session).partition("?")[2]
    assert api.client.get(f"/api/v1/objects/{session}?{query}").status_code == 403
    signed = urlsplit(api.services.objects.presign(session, 60)).query
    assert api.client.get(f"/api/v1/sessions/{session}/trace?{signed}").status_code == 403


def test_a_server_that_cannot_sign_says_so_instead(api: Api, settings: Settings, state_url: str) -> None:
    session = api.session()
    caller = Caller.alone(api.services.records.get("sessions", session)["owner"].strip('"'))
    with connect(state_url) as client:
        service = TraceService(api.services.records, RedisCalls(client), UrlSigner("", settings.public_url))
        answer = service.export(session, caller)
    assert (answer["status"], "url_secret" in answer["error"]) == ("failed", True)
