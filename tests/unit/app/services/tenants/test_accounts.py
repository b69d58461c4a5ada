"""Accounts: stored in the object store, looked up in the state server, and restored after that was emptied."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import redis

from app.domain.accounts import ACCOUNTS, SCOPES, Caller, Key, Organisation, Project, User
from app.domain.limits import Limits
from app.errors import BadRequest, NotFound, SetupError, Unauthorized, Unavailable
from app.services.tenants.accounts import AccountService
from app.services.tenants.authentication import Authenticator
from app.services.tenants.limits import LimitsFinder
from app.stores.objects.accounts import AccountFiles
from app.stores.redis.records import RedisRecords


@pytest.fixture
def caller_of(client: redis.Redis) -> Authenticator:
    return Authenticator((), RedisRecords(client), None)


def member(accounts: AccountService, role: str = "member") -> tuple[User, Project]:
    organisation = accounts.add_organisation("Tinkers")
    project = accounts.add_project(organisation.id, "kettles")
    user = accounts.add_user(organisation.id, "jo@example.org")
    return accounts.set_role(user.id, project.id, role), project


def make_key(accounts: AccountService, user: User, project: Project, **more) -> tuple[Key, str]:
    return accounts.add_key(user.id, project.id, SCOPES, **more)


def everything(accounts: AccountService) -> list:
    return [account for cls in ACCOUNTS for account in accounts.all(cls)]


def test_a_key_is_its_users_with_his_roles_and_its_own_scopes(accounts, caller_of):
    user, project = member(accounts)
    key, text = accounts.add_key(user.id, project.id, ["sample"], name="ci")
    assert text.startswith(f"tml-{key.id}.")
    expected = Caller(key.id, user.id, user.organisation, project.id, {project.id: "member"}, frozenset({"sample"}))
    assert caller_of(text) == expected


def test_a_key_for_one_project_works_in_no_other_one_also_after_the_accounts_were_restored(accounts, caller_of, client):
    user, project = member(accounts)
    _, text = make_key(accounts, user, project, only_project=True)
    accounts.set_role(user.id, accounts.add_project(user.organisation, "other").id, "admin")
    assert caller_of(text).roles == {project.id: "member"}
    client.flushall()
    accounts.rebuild()
    assert caller_of(text).roles == {project.id: "member"}


def test_nobody_keeps_a_keys_secret(accounts, client, tmp_path):
    user, project = member(accounts)
    _, text = make_key(accounts, user, project)
    secret = text.partition(".")[2].encode()
    assert len(secret) >= 43, "256 bits"
    stored = [name for name in client.scan_iter("*") if client.type(name) == b"hash"]
    assert stored and not any(secret in value for name in stored for value in client.hgetall(name).values())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not any(secret in file.read_bytes() for file in files)


def test_an_unknown_key_and_a_wrong_secret_get_the_same_answer(accounts, caller_of):
    user, project = member(accounts)
    key, text = make_key(accounts, user, project)
    wrong = [f"tml-{key.id}.", f"tml-{key.id}.x", f"tml-{key.id}", text[:-1], text + "x", "tml-0.x", "tml-", "tml-ü.ü"]
    for credential in wrong:
        with pytest.raises(
            Unauthorized,
            match=r"^this API key is not known here; check the key, and that the base URL is that of its server$",
        ):
            caller_of(credential)


def test_a_revoked_key_stops_at_once_and_the_users_others_go_on(accounts, caller_of):
    user, project = member(accounts)
    (key, text), (_, other) = make_key(accounts, user, project), make_key(accounts, user, project)
    for _ in range(2):  # a repeat is fine
        accounts.revoke(key.id)
        with pytest.raises(Unauthorized, match="this API key was revoked"):
            caller_of(text)
    assert caller_of(other).user == user.id


def test_an_expired_key_stops(accounts, caller_of):
    user, project = member(accounts)
    _, text = make_key(accounts, user, project, lifetime_s=3600)
    assert caller_of(text).user == user.id
    _, text = make_key(accounts, user, project, lifetime_s=-1)
    with pytest.raises(Unauthorized, match="this API key has expired"):
        caller_of(text)


def test_no_key_of_a_removed_user_works_and_he_gets_no_other(accounts, caller_of):
    user, project = member(accounts)
    _, text = make_key(accounts, user, project)
    accounts.remove_user(user.id)
    with pytest.raises(Unauthorized, match="the user of this API key was removed"):
        caller_of(text)
    with pytest.raises(BadRequest, match="is not in project"):
        make_key(accounts, user, project)


def test_a_changed_role_holds_for_keys_that_are_there(accounts, caller_of):
    user, project = member(accounts)
    _, text = make_key(accounts, user, project)
    for role in ("viewer", "admin"):
        accounts.set_role(user.id, project.id, role)
        assert caller_of(text).roles == {project.id: role}
    accounts.set_role(user.id, project.id, None)
    assert caller_of(text).roles == {}


def test_an_emptied_state_server_gets_every_account_back_as_it_was(accounts, caller_of, client):
    user, project = member(accounts)
    (_, text), (revoked, lost) = make_key(accounts, user, project), make_key(accounts, user, project)
    accounts.revoke(revoked.id)
    accounts.set_role(user.id, project.id, "viewer")
    before, caller = everything(accounts), caller_of(text)
    client.flushall()
    with pytest.raises(Unauthorized):
        caller_of(text)
    assert accounts.rebuild() == (5, [])
    assert (everything(accounts), caller_of(text)) == (before, caller)
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(lost)
    assert accounts.rebuild() == (0, []), "what is there is as it is"


def test_a_state_server_that_was_set_back_learns_what_changed_since(accounts, client):
    user, project = member(accounts)
    old = client.hgetall(f"tinsmith:users:{user.id}")
    accounts.set_role(user.id, project.id, "viewer")
    client.hset(f"tinsmith:users:{user.id}", mapping=old)
    assert accounts.rebuild() == (1, [])
    assert accounts.all(User)[0].roles == {project.id: "viewer"}


def test_an_object_store_that_was_set_back_takes_later_changes(accounts, objects):
    user, project = member(accounts)
    accounts.set_role(user.id, project.id, "viewer")
    objects.delete(objects.list(f"accounts/users/{user.id}/")[1:])
    assert accounts.set_role(user.id, project.id, "admin").version == 4
    assert accounts.all(User)[0].roles == {project.id: "admin"}


def test_while_the_object_store_is_away_a_key_can_be_revoked_and_nothing_be_made(accounts, objects, caller_of, client):
    user, project = member(accounts)
    key, text = make_key(accounts, user, project)
    objects.away = True
    with pytest.raises(Unavailable):
        accounts.revoke(key.id)
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(text)
    with pytest.raises(Unavailable):
        accounts.add_organisation("Smiths")
    assert len(accounts.all(Organisation)) == 1
    objects.away = False
    accounts.rebuild()
    accounts.set_limits(key.id, {"requests_per_s": 0.5})
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(text)
    accounts.revoke(key.id)
    client.flushall()
    accounts.rebuild()
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(text)


def test_a_user_who_was_removed_while_the_object_store_was_away_stays_removed(accounts, objects, caller_of):
    user, project = member(accounts)
    _, text = make_key(accounts, user, project)
    objects.away = True
    with pytest.raises(Unavailable):
        accounts.remove_user(user.id)
    objects.away = False
    assert accounts.set_role(user.id, project.id, "viewer").removed
    with pytest.raises(Unauthorized, match="removed"):
        caller_of(text)


def test_of_two_changes_at_once_none_is_lost(accounts, objects, client):
    user, project = member(accounts)
    other = accounts.add_project(user.organisation, "pans")
    raced = []

    class Racing(AccountFiles):
        """Makes another user's change between a read and a write, once."""

        def add(self, account) -> bool:
            if not raced:
                raced.append(accounts.set_role(user.id, other.id, "viewer"))
            return super().add(account)

    AccountService(Racing(objects), RedisRecords(client)).set_role(user.id, project.id, "admin")
    assert accounts.all(User)[0].roles == {other.id: "viewer", project.id: "admin"}


def test_a_role_is_only_had_in_ones_own_organisation(accounts):
    _, project = member(accounts)
    stranger = accounts.add_user(accounts.add_organisation("Smiths").id, "al@example.org")
    with pytest.raises(BadRequest, match=f"user {stranger.id} does not"):
        accounts.set_role(stranger.id, project.id, "viewer")
    with pytest.raises(BadRequest, match=f"user {stranger.id} is not in project {project.id}"):
        make_key(accounts, stranger, project)


def test_what_is_not_there_is_named(accounts):
    user, project = member(accounts)
    calls = [
        ("organisation 'org-0'", lambda: accounts.add_project("org-0", "x")),
        ("organisation 'org-0'", lambda: accounts.add_user("org-0", "x")),
        ("user 'user-0'", lambda: accounts.set_role("user-0", project.id, "member")),
        ("project 'project-0'", lambda: accounts.set_role(user.id, "project-0", "member")),
        ("user 'user-0'", lambda: accounts.remove_user("user-0")),
        ("key '0'", lambda: accounts.revoke("0")),
    ]
    for name, call in calls:
        with pytest.raises(NotFound, match=f"there is no {name}"):
            call()
    before = everything(accounts)
    for name in ("", " ", "a\nb", "x" * 201):
        with pytest.raises(BadRequest, match="is not a name"):
            accounts.add_organisation(name)
    assert everything(accounts) == before


def test_a_damaged_object_is_named_and_the_others_come_back(accounts, objects, client):
    user, _ = member(accounts)
    newest = f"accounts/users/{user.id}/00000003.json"
    objects.put_new(newest, b'{"id": 7}')
    client.flushall()
    assert accounts.rebuild() == (2, [newest])
    with pytest.raises(SetupError, match=newest):
        accounts.remove_user(user.id)


def test_a_later_versions_account_is_not_cut_down(accounts, objects):
    """Fields that a newer server wrote are ignored; the known fields count."""
    user, _ = member(accounts)
    content = json.loads(objects.read(f"accounts/users/{user.id}/00000002.json"))
    later = json.dumps({**content, "version": 3, "shoe_size": 43}).encode()
    objects.put_new(f"accounts/users/{user.id}/00000003.json", later)
    assert accounts.user(user.id) == replace(user, version=3)


def test_limits_of_projects_and_keys_are_part_of_them_and_come_back_with_them(accounts, objects, client):
    user, project = member(accounts)
    key, _ = make_key(accounts, user, project)
    accounts.set_limits(project.id, {"tokens_per_s": 50.0, "live_models": 3, "weight": 2.0})
    accounts.set_limits(project.id, {"live_models": None}, default=("weight",))
    accounts.set_limits(key.id, {"requests_per_s": 0.5})
    client.flushall()
    accounts.rebuild()
    limits = LimitsFinder(RedisRecords(client), Limits(live_models=7, storage_bytes=10, weight=3.0))
    assert limits.project(project.id) == Limits(tokens_per_s=50.0, storage_bytes=10, weight=3.0)
    assert limits.project("one-of-the-settings") == Limits(live_models=7, storage_bytes=10, weight=3.0)
    assert limits.key(key.id) == Limits(requests_per_s=0.5)
    assert limits.key("one-of-the-settings") == Limits()


def test_an_account_that_was_stored_before_there_were_limits_is_read(accounts, objects, client):
    _, project = member(accounts)
    stored = f"accounts/projects/{project.id}/00000001.json"
    fields = {name: value for name, value in json.loads(objects.read(stored)).items() if name != "limits"}
    objects.delete([stored])
    objects.put_new(stored, json.dumps(fields).encode())
    client.hdel(f"tinsmith:projects:{project.id}", "limits")
    assert LimitsFinder(RedisRecords(client), Limits()).project(project.id) == Limits()
    assert accounts.set_limits(project.id, {"live_models": 3}).version == 2


@pytest.mark.parametrize("limit", ['{"a_later_one": 7}', '{"keep_checkpoints": 5000}'])
def test_limits_that_a_later_version_set_stop_no_save(accounts, client, limit):
    """An error would drop the states of all tenants of the trainer."""
    _, project = member(accounts)
    limits = LimitsFinder(RedisRecords(client), Limits(checkpoint_ttl_s=7200, weight=3.0))
    client.hset(f"tinsmith:projects:{project.id}", "limits", limit)
    assert limits.checkpoint_ttl_s(project.id) is None, "kept too long is better than deleted too soon"
    with pytest.raises((TypeError, ValueError)):
        limits.project(project.id)


@pytest.mark.parametrize(
    "wrong", [{"tokens_per_s": 0}, {"live_models": -1}, {"tokens_per_s": float("inf")}, {"weight": None}]
)
def test_limits_nothing_could_meet_are_refused(accounts, wrong):
    _, project = member(accounts)
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        accounts.set_limits(project.id, wrong)
    with pytest.raises(NotFound):
        accounts.set_limits("project-nobodys", {"live_models": 1})


@pytest.mark.parametrize("name", ["weight", "checkpoint_ttl_s", "keep_checkpoints", "capture_days", "monthly_budget"])
def test_a_limit_of_projects_is_refused_for_a_key(accounts, name):
    key, _ = make_key(accounts, *member(accounts))
    with pytest.raises(BadRequest, match=f"a key has no {name}: "):
        accounts.set_limits(key.id, {name: 3600})
    assert accounts.set_limits(key.id, {}, default=[name]).limits == {}
