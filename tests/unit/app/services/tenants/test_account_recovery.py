"""Account recovery after the state server was emptied: account keys still work.

Wrong keys cost the object store nothing.
"""

from __future__ import annotations

import threading

import pytest
import redis

from app.errors import Unauthorized, Unavailable
from app.services.tenants.accounts import AccountRecovery, AccountService
from app.services.tenants.authentication import Authenticator, Tokens
from app.stores.redis.records import RedisRecords


@pytest.fixture
def tokens() -> Tokens:
    return Tokens("s" * 32, 3600)


@pytest.fixture
def account_recovery(accounts: AccountService, client: redis.Redis) -> AccountRecovery:
    return AccountRecovery(accounts, RedisRecords(client))


@pytest.fixture
def authenticator(account_recovery: AccountRecovery, tokens: Tokens, client: redis.Redis) -> Authenticator:
    return Authenticator((), RedisRecords(client), tokens, account_recovery)


def new_key(accounts: AccountService) -> str:
    organisation = accounts.add_organisation("Tinkers").id
    project = accounts.add_project(organisation, "kettles").id
    user = accounts.add_user(organisation, "jo@example.org").id
    accounts.set_role(user, project, "member")
    return accounts.add_key(user, project, {"train"})[1]


def test_a_key_is_the_same_caller_after_the_state_server_was_emptied(accounts, authenticator, tokens, client) -> None:
    key = new_key(accounts)
    before = authenticator(key)
    client.flushall()
    assert authenticator(key) == before
    client.flushall()
    assert authenticator(tokens.issue(before, "")) == before, "and so is a token of it"


def test_a_revoked_key_stays_revoked(accounts, authenticator, client) -> None:
    key = new_key(accounts)
    accounts.revoke(key.removeprefix("tml-").partition(".")[0])
    client.flushall()
    with pytest.raises(Unauthorized, match="revoked"):
        authenticator(key)


def test_wrong_keys_are_looked_for_once_however_many_come(accounts, authenticator, objects, client) -> None:
    key = new_key(accounts)
    client.flushall()
    with pytest.raises(Unauthorized, match="not known"):
        authenticator("tml-000000000000.wrong")
    reads = objects.reads
    assert reads > 0
    for i in range(1000):
        with pytest.raises(Unauthorized, match="not known"):
            authenticator(f"tml-{i:012x}.wrong")
    assert objects.reads == reads
    assert authenticator(key)
    assert objects.reads == reads, "all came back at once"


def test_while_the_object_store_is_away_no_key_is_called_wrong(
    accounts, authenticator, objects, client, monkeypatch
) -> None:
    key = new_key(accounts)
    client.flushall()
    monkeypatch.setattr("app.services.tenants.accounts._RETRY_S", 3600.0)
    objects.away, reads = True, objects.reads
    for _ in range(50):
        with pytest.raises(Unavailable):
            authenticator(key)
    assert objects.reads == reads + 1, "it is asked once in a while"
    objects.away = False
    monkeypatch.setattr("app.services.tenants.accounts._RETRY_S", 0.0)
    assert authenticator(key)


def test_while_one_reads_the_others_are_asked_to_retry(accounts, authenticator, objects, client) -> None:
    key = new_key(accounts)
    client.flushall()
    objects.gate = threading.Event()
    reads, found = objects.reads, []
    first = threading.Thread(target=lambda: found.append(authenticator(key)), daemon=True)
    first.start()
    while objects.reads == reads:
        first.join(0.01)
    with pytest.raises(Unavailable, match="try again"):
        authenticator(key)
    objects.gate.set()
    first.join(30)
    assert found == [authenticator(key)]


def test_one_that_was_emptied_in_the_middle_is_read_again(accounts, authenticator, client, monkeypatch) -> None:
    key = new_key(accounts)
    client.flushall()
    rebuild = accounts.rebuild

    def emptied() -> tuple[int, list[str]]:
        done = rebuild()
        client.flushall()
        return done

    monkeypatch.setattr(accounts, "rebuild", emptied)
    with pytest.raises(Unauthorized):
        authenticator(key)
    monkeypatch.setattr(accounts, "rebuild", rebuild)
    assert authenticator(key)
