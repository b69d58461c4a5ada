"""A token is valid exactly as long as its API key."""

from __future__ import annotations

import time

import jwt
import pytest
import redis

from app.domain.accounts import SCOPES, Caller
from app.errors import InvalidToken, Unauthorized
from app.services.tenants.authentication import Authenticator, Tokens
from app.settings import hash_key
from app.stores.redis.records import RedisRecords

KEY = "tml-of-the-settings"


@pytest.fixture
def tokens() -> Tokens:
    return Tokens("secret", 3600)


@pytest.fixture
def authenticator(client: redis.Redis, tokens: Tokens) -> Authenticator:
    return Authenticator((hash_key(KEY),), RedisRecords(client), tokens)


def test_a_token_of_a_key_of_the_settings_is_the_same_caller(authenticator, tokens):
    token = tokens.issue(authenticator(KEY), "")
    assert token.startswith("eyJ")
    assert authenticator(token) == authenticator(KEY)


def test_a_token_made_with_a_token_ends_when_that_one_does(authenticator, tokens):
    first = Tokens("secret", 60).issue(authenticator(KEY), "")
    second = tokens.issue(authenticator(first), "")
    third = tokens.issue(authenticator(second), "")
    ends = {jwt.decode(token, options={"verify_signature": False})["exp"] for token in (first, second, third)}
    assert len(ends) == 1


def test_a_token_goes_with_its_key(authenticator, tokens, accounts):
    organisation = accounts.add_organisation("Tinkers")
    project = accounts.add_project(organisation.id, "kettles")
    user = accounts.add_user(organisation.id, "jo@example.org")
    accounts.set_role(user.id, project.id, "member")
    key, text = accounts.add_key(user.id, project.id, SCOPES)
    token = tokens.issue(authenticator(text), user.email)
    assert authenticator(token) == authenticator(text)
    claims = jwt.decode(token, options={"verify_signature": False})
    assert (claims["org_id"], claims["email"]) == (organisation.id, "jo@example.org")
    assert text.partition(".")[2] not in str(claims)
    accounts.revoke(key.id)
    with pytest.raises(Unauthorized, match="revoked") as error:
        authenticator(token)
    assert not isinstance(error.value, InvalidToken), "another token would not help"


def claims(**changed: object) -> dict[str, object]:
    return {"iss": "tinsmith", "exp": time.time() + 60, "key": hash_key(KEY)[:16], **changed}


def test_nobody_else_makes_a_token(authenticator, tokens):
    good = tokens._key
    forged = {
        "another secret": jwt.encode(claims(), b"x" * 32, algorithm="HS256"),
        "unsigned": jwt.encode(claims(), None, algorithm="none"),
        "another algorithm": jwt.encode(claims(), good * 2, algorithm="HS512"),
        "another issuer": jwt.encode(claims(iss="passport-x"), good, algorithm="HS256"),
        "without an end": jwt.encode({"iss": "tinsmith", "key": "x"}, good, algorithm="HS256"),
        "too old": jwt.encode(claims(exp=time.time() - 60), good, algorithm="HS256"),
        "of no key": jwt.encode({"iss": "tinsmith", "exp": time.time() + 60}, good, algorithm="HS256"),
        "no token": "eyJ",
    }
    for what, token in forged.items():
        with pytest.raises(InvalidToken):
            pytest.fail(f"{what}: taken for {authenticator(token)}")
    assert authenticator(jwt.encode(claims(), good, algorithm="HS256")) == authenticator(KEY), (
        "the others fail for what they lack"
    )


def test_without_tokens_none_is_taken(client):
    caller = Caller.alone(hash_key(KEY)[:16])
    with pytest.raises(Unauthorized, match="not known here"):
        Authenticator((hash_key(KEY),), RedisRecords(client), None)(Tokens("secret", 3600).issue(caller, ""))
