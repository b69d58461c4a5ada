"""Organisations, users and keys that `tinsmith admin` makes on a running stack, through the real SDK."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from app import cli
from tests.contract.awaiting import await_true
from tests.contract.data import supervised, train
from tests.contract.stack import BASE, Stack

Admin = Callable[..., str]


@pytest.fixture
def admin(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Admin:
    """Output of an action."""

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
    assert looking.get_training_run(run).result().model_owner.startswith("tml:organization_user:user-")
    with pytest.raises(tinker.NotFoundError):
        foreign.get_training_run(run).result()
    with pytest.raises(tinker.PermissionDeniedError, match="viewer"):
        tinker.ServiceClient(base_url=stack.url, api_key=viewer).create_lora_training_client(base_model=BASE)
    with pytest.raises(tinker.NotFoundError, match=project):
        tinker.ServiceClient(base_url=stack.url, api_key=stranger, project_id=project).create_lora_training_client(
            base_model=BASE
        )


def test_a_save_has_its_projects_ttl_unless_it_gives_one(stack: Stack, admin: Admin):
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    set_to = admin("limits", "set", project, "--checkpoint-ttl-s", "7200", "--keep-checkpoints", "2")
    assert set_to == "checkpoint_ttl_s=7200 keep_checkpoints=2"
    key = user_key(admin, organisation, project, "member")
    with tinker.ServiceClient(base_url=stack.url, api_key=key) as service:
        training = service.create_lora_training_client(base_model=BASE, rank=4).result()
        for name, ttl_s in {"projects": None, "own": 3600}.items():
            training.save_state(name, ttl_seconds=ttl_s).result()
    saved = tinker.RestClient(base_url=stack.url, api_key=key).list_checkpoints(training.model_id).result().checkpoints
    lives = {one.checkpoint_id: round((one.expires_at - one.time).total_seconds()) for one in saved}
    assert lives == {"weights/projects": 7200, "weights/own": 3600}


def test_a_project_without_budget_saves_and_goes_on_when_it_has_one(stack: Stack, admin: Admin):
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    assert admin("limits", "set", project, "--monthly-budget", "0") == "monthly_budget=0.0"
    key = user_key(admin, organisation, project, "admin")
    with tinker.ServiceClient(base_url=stack.url, api_key=key) as service:
        training = service.create_lora_training_client(base_model=BASE, rank=4).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        refused = training.forward_backward(supervised(), "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
        with pytest.raises(tinker.PermissionDeniedError, match=f"{project} has spent 0 US dollars .* the budget"):
            refused.result()
        with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
            step.result()
        with pytest.raises(tinker.PermissionDeniedError, match="monthly_budget is 0"):
            sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result()
        assert training.save_state("kept").result().path
        admin("limits", "set", project, "--monthly-budget", "none")
        call = partial(training.forward_backward, supervised(), "cross_entropy")
        await_true(lambda: is_accepted(call), "the budget was lifted")
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    (row,) = [line for line in admin("usage", project).splitlines() if line.startswith(training.model_id)]
    _, base, trained, *_, device_s, _, _ = row.split("\t")
    assert (base, int(trained)) == (BASE, sum(len(datum.model_input.to_ints()) for datum in supervised()))
    assert float(device_s) > 0


def is_accepted(call: Callable[[], tinker.APIFuture[Any]]) -> bool:
    """False while the call is refused with a 403."""
    try:
        call().result()
    except tinker.PermissionDeniedError:
        return False
    return True


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
    """Clients of one of the stacks exchange their keys for tokens, so all its tests run with tokens."""
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    rest = tinker.RestClient(base_url=stack.url, api_key=user_key(admin, organisation, project, "viewer"))
    if not stack.settings().api.pjwt_auth_enabled:
        with pytest.raises(RuntimeError, match="JWT"):
            rest.whoami().result()
        return
    me = rest.whoami().result()
    assert (me.org_urn, me.email) == (f"tml:organization:{organisation}", "viewer@example.org")
    assert me.user_urn.startswith("tml:organization_user:user-")


def test_a_user_logs_in_with_a_key_sees_who_he_is_and_logs_out(
    stack: Stack, admin: Admin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Credentials are kept on the client; a logout leaves the key valid."""
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    key = user_key(admin, organisation, project, "viewer", "--name", "laptop")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", stack.url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)

    def tinker_command(*arguments: str, given: str | None = None) -> Result:
        return CliRunner().invoke(main_cli, arguments, input=given)

    wrong = tinker_command("auth", "login", given="tml-nobody\n")
    assert (wrong.exit_code, isinstance(wrong.exception, TinkerCliError)) == (1, True)
    assert "not known here" in str(wrong.exception.details)
    said = tinker_command("auth", "login", given=f"{key}\n").stdout
    assert "Logged in as viewer@example.org (Tinkers). Stored API key 'laptop'" in said
    # A separate process, because a process keeps the server that it found in its environment.
    me = subprocess.run([sys.executable, "-m", "tinker.cli", "auth", "whoami"], capture_output=True, text=True)
    if stack.settings().api.pjwt_auth_enabled:
        assert f"tml:organization:{organisation}" in me.stdout
        assert "viewer@example.org" in me.stdout
    else:
        assert (me.returncode, "JWT" in me.stderr) == (1, True)
    assert "still active" in tinker_command("auth", "logout").stdout
    assert tinker_command("auth", "logout").exit_code == 1
    rest = tinker.RestClient(base_url=stack.url, api_key=key)
    assert rest.get_server_capabilities().result().supported_models


def test_a_checkpoint_is_loaded_and_copied_with_a_key_that_was_lent(stack: Stack, admin: Admin):
    organisation, elsewhere = admin("org", "create", "Tinkers"), admin("org", "create", "Smiths")
    project = admin("project", "create", "kettles", "--org", organisation)
    others = admin("project", "create", "pans", "--org", elsewhere)
    user = admin("user", "create", "jo@example.org", "--org", organisation)
    admin("user", "role", user, project, "member")
    own, lent = (admin("key", "create", "--user", user, *options) for options in ((), ("--scopes", "none")))
    borrower = user_key(admin, elsewhere, others, "member")
    with tinker.ServiceClient(base_url=stack.url, api_key=own) as lender:
        training = lender.create_lora_training_client(base_model=BASE, rank=4).result()
        train(training, 2)
        path = training.save_state("lent").result().path
        expected = _logprobs(training)
    with tinker.ServiceClient(base_url=stack.url, api_key=borrower, project_id=others) as service:
        with pytest.raises(tinker.NotFoundError):
            service.create_training_client_from_state_with_optimizer(path).result()
        with pytest.raises(tinker.BadRequestError, match="weights_access_token"):
            service.create_training_client_from_state(path, weights_access_token="tml-nobody.s").result()
        borrowed = service.create_training_client_from_state_with_optimizer(path, weights_access_token=lent).result()
        assert _logprobs(borrowed) == expected
        fresh = service.create_lora_training_client(base_model=BASE, rank=4).result()
        fresh.load_state(path, weights_access_token=lent).result()
        assert _logprobs(fresh) == expected
        copied = service.copy_weights(path, weights_access_token=lent).result()
        assert _logprobs(service.create_training_client_from_state(copied).result()) == expected


def _logprobs(training: tinker.TrainingClient) -> list[list[float]]:
    outputs = training.forward(supervised(), "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].tolist() for output in outputs]


def test_a_run_goes_on_when_a_limit_refuses_a_save_and_waits_where_one_passes(stack: Stack, admin: Admin):
    organisation = admin("org", "create", "Tinkers")
    project = admin("project", "create", "kettles", "--org", organisation)
    admin("limits", "set", project, "--storage-bytes", "0", "--live-models", "1", "--tokens-per-s", "4.5")
    key = user_key(admin, organisation, project, "member")
    with tinker.ServiceClient(base_url=stack.url, api_key=key) as service:
        training = service.create_lora_training_client(base_model=BASE, rank=4).result()
        with pytest.raises(tinker.PermissionDeniedError, match="storage_bytes is 0"):
            training.save_state("kept").result()
        with pytest.raises(tinker.PermissionDeniedError, match="live_models is 1"):
            service.create_lora_training_client(base_model=BASE, rank=4).result()
        before = put_off(stack)
        # 54 tokens each, of which one empties the bucket of 45; the SDK comes again with the second in two seconds. On
        # a busy machine it may be sent so late that the bucket is full, but not every time.
        for _ in range(5):
            assert len(train(training, 2)) == 2
            if put_off(stack) > before:
                break
        assert put_off(stack) > before


def put_off(stack: Stack) -> float:
    """Number of batches that were answered with a 429."""
    with urllib.request.urlopen(f"{stack.url}/metrics") as answer:
        found = re.findall(r'_count\{route="/api/v1/forward_backward",status="429"\} (\S+)', answer.read().decode())
    return sum(map(float, found))
