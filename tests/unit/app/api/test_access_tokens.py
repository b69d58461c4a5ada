"""Access to another project's checkpoint by a lent key: it is loaded and copied, and the key is stored nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from werkzeug.test import TestResponse

from app.services.tenants.accounts import AccountService
from app.services.tenants.authentication import Tokens
from app.stores.redis.client import connect
from tests.logs import everything_logged
from tests.unit.app.api.test_copies import contents, project, saved
from tests.unit.app.conftest import API, Api

Use = Callable[[Api, str, str | None], TestResponse]


@pytest.fixture
def lender(api: Api, accounts: AccountService) -> Api:
    """A member with an account, and a checkpoint."""
    organisation = accounts.add_organisation("Tinkers").id
    kettles = accounts.add_project(organisation, "kettles").id
    user = accounts.add_user(organisation, "jo@example.org").id
    accounts.set_role(user, kettles, "member")
    return replace(api, key=accounts.add_key(user, kettles, {"train", "sample", "manage"})[1])


def reading_key(lender: Api, accounts: AccountService) -> str:
    caller = lender.services.authenticator(lender.key)
    return accounts.add_key(caller.user, caller.project, ())[1]


def _token(token: str | None) -> dict[str, Any]:
    return {} if token is None else {"weights_access_token": token}


def _new(api: Api, path: str, token: str | None) -> TestResponse:
    return api.post("load_weights", {"session_id": api.session(), "model_seq_id": 0, "path": path, **_token(token)})


def _into(api: Api, path: str, token: str | None) -> TestResponse:
    return api.post("load_weights", {"model_id": api.model(), "seq_id": 1, "path": path, **_token(token)})


def _copied(api: Api, path: str, token: str | None) -> TestResponse:
    """Copies the checkpoint with the token in a header, as the SDK does."""
    headers = {"X-API-Key": api.key, **({} if token is None else {"X-Tinker-Weights-Access-Token": token})}
    body = {"source_path": path, "destination_project_id": project(api)}
    return api.client.post(f"{API}/copy_weights", json=body, headers=headers)


def _copied_by_body(api: Api, path: str, token: str | None) -> TestResponse:
    return api.post("copy_weights", {"source_path": path, "destination_project_id": project(api), **_token(token)})


USES: dict[str, Use] = {
    "a new model": _new,
    "a model": _into,
    "a copy": _copied,
    "a copy, in the body": _copied_by_body,
}


@pytest.mark.parametrize("use", USES)
def test_with_a_key_that_only_reads_it_is_used_and_what_is_made_is_the_borrowers(
    lender: Api, stranger: Api, accounts: AccountService, use: str
) -> None:
    path = saved(lender)
    refused = USES[use](stranger, path, None)
    assert refused.status_code == (400 if use == "a model" else 404)
    answer = USES[use](stranger, path, reading_key(lender, accounts))
    assert answer.status_code == 200, answer.json
    if "copy" in use:
        assert contents(stranger, answer.json["tinker_path"]) == contents(stranger, path)
    else:
        owner = stranger.services.records.get("models", answer.json["model_id"])["owner"]
        assert owner.strip('"') == project(stranger)
    assert USES[use](stranger, path, None).status_code == refused.status_code, "the next one needs it again"


@pytest.mark.parametrize("use", USES)
def test_a_token_opens_no_more_than_its_holder_may_read(
    lender: Api, stranger: Api, accounts: AccountService, use: str
) -> None:
    path = saved(lender)
    elsewhere = accounts.add_organisation("Smiths").id
    pans = accounts.add_project(elsewhere, "pans").id
    user = accounts.add_user(elsewhere, "al@example.org").id
    accounts.set_role(user, pans, "admin")
    others = accounts.add_key(user, pans, ())[1]
    with_it, without = (USES[use](stranger, path, token) for token in (others, None))
    assert (with_it.status_code, with_it.json["error"]) == (without.status_code, without.json["error"])
    assert with_it.json["detail"] == without.json["detail"]


@pytest.mark.parametrize("use", USES)
def test_a_token_that_is_no_key_or_was_revoked_is_said_to_be_so(
    lender: Api, stranger: Api, accounts: AccountService, use: str
) -> None:
    path = saved(lender)
    revoked = reading_key(lender, accounts)
    accounts.revoke(revoked.removeprefix("tml-").partition(".")[0])
    for token, why in (("tml-nobody.s", "not known"), ("", "not known"), (revoked, "revoked")):
        answer = USES[use](stranger, path, token)
        assert (answer.status_code, "weights_access_token" in answer.json["detail"]) == (400, True), answer.json
        assert why in answer.json["detail"]
        assert not token or token not in answer.text


def test_ones_own_and_public_checkpoints_need_none(lender: Api, stranger: Api) -> None:
    assert _new(lender, saved(lender), "tml-nobody.s").status_code == 200
    assert _new(stranger, saved(lender, public=True), "tml-nobody.s").status_code == 200


def test_a_token_made_from_a_key_will_do(
    lender: Api, stranger: Api, accounts: AccountService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens("s" * 32, 3600)
    monkeypatch.setattr(lender.services.authenticator, "_tokens", tokens)
    path = saved(lender)
    jwt = tokens.issue(lender.services.authenticator(reading_key(lender, accounts)), "")
    assert _new(stranger, path, jwt).status_code == 200


def test_the_same_call_under_another_token_is_the_same_call(
    lender: Api, stranger: Api, accounts: AccountService
) -> None:
    body = {"session_id": stranger.session(), "model_seq_id": 0, "path": saved(lender)}
    answers = [
        stranger.post("load_weights", {**body, "weights_access_token": reading_key(lender, accounts)}) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json == answers[1].json


@pytest.mark.parametrize("use", USES)
def test_a_token_is_in_no_log_line_and_in_no_store(
    lender: Api, stranger: Api, accounts: AccountService, use: str
) -> None:
    token, path = reading_key(lender, accounts), saved(lender)
    with everything_logged() as stream:
        assert USES[use](stranger, path, token).status_code == 200
        body = {"model_id": "x", "seq_id": 1, "path": path, "weights_access_token": [token]}
        assert token not in stranger.post("load_weights", body).text
    secret = token.rpartition(".")[2]
    assert secret not in stream.getvalue()
    with connect(stranger.services.settings.redis.url) as client:
        client.config_set("rdbcompression", "no")  # DUMP compresses as the file does
        dumps = [client.dump(key) or b"" for key in client.scan_iter("*")]
        client.config_set("rdbcompression", "yes")
    objects = stranger.services.objects
    stored = [*dumps, *(objects.read(key) for key in objects.list(""))]
    assert any(path.encode() in one for one in stored)
    assert all(secret.encode() not in one for one in stored)
