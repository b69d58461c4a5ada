"""Organisations, users and keys that `tinsmith admin` makes on a running stack, through the real SDK."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tinker

from app import cli
from tests.contract.data import train
from tests.contract.stack import BASE, Stack

Admin = Callable[..., str]


@pytest.fixture
def admin(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Admin:
    """What an action printed."""

    def run(*arguments: str) -> str:
        assert cli.main(["admin", *arguments, "--data-dir", str(stack.data_dir)]) == 0
        return capsys.readouterr().out.strip()

    return run


def user_key(admin: Admin, organisation: str, project: str, role: str, *options: str) -> str:
    user = admin("user", "create", f"{role}@example.org", "--org", organisation)
    admin("user", "role", user, project, role)
    return admin("key", "create", "--user", user, *options)


def test_colleagues_see_a_run_viewers_change_nothing_and_others_find_none(stack: Stack, admin: Admin):
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    elsewhere = admin("org", "create", "Smiths")
    others = admin("project", "create", "pans", "--org", elsewhere)
    member, viewer = (user_key(admin, organisation, project, role) for role in ("member", "viewer"))
    stranger = user_key(admin, elsewhere, others, "admin")

    with tinker.ServiceClient(base_url=stack.url, api_key=member, project_id=project) as service:
        training = service.create_lora_training_client(base_model=BASE, rank=4).result()
        assert len(train(training, 2)) == 2
        run = training.model_id
    looking, foreign = (tinker.RestClient(base_url=stack.url, api_key=key) for key in (viewer, stranger))
    assert looking.get_training_run(run).result().model_owner == project
    with pytest.raises(tinker.NotFoundError):
        foreign.get_training_run(run).result()
    with pytest.raises(tinker.PermissionDeniedError, match="viewer"):
        tinker.ServiceClient(base_url=stack.url, api_key=viewer).create_lora_training_client(base_model=BASE)
    with pytest.raises(tinker.NotFoundError, match=project):
        tinker.ServiceClient(base_url=stack.url, api_key=stranger, project_id=project).create_lora_training_client(
            base_model=BASE
        )


def test_a_key_that_is_revoked_stops_a_client_that_runs(stack: Stack, admin: Admin):
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    key = user_key(admin, organisation, project, "member")
    rest = tinker.RestClient(base_url=stack.url, api_key=key)
    assert rest.get_server_capabilities().result().supported_models
    admin("key", "revoke", key.removeprefix("tml-").partition(".")[0])
    with pytest.raises(tinker.AuthenticationError, match="revoked"):
        rest.get_server_capabilities().result()


def test_who_one_is_comes_out_of_a_token(stack: Stack, admin: Admin):
    """One of the stacks has its clients change their keys into tokens, so all its tests are called with them."""
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    rest = tinker.RestClient(base_url=stack.url, api_key=user_key(admin, organisation, project, "viewer"))
    if not stack.settings().api.pjwt_auth_enabled:
        with pytest.raises(RuntimeError, match="JWT"):
            rest.whoami().result()
        return
    me = rest.whoami().result()
    assert (me.org_urn, me.email) == (f"tml:organization:{organisation}", "viewer@example.org")
    assert me.user_urn.startswith("tml:user:user-")
