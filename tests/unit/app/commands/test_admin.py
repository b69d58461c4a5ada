"""`tinsmith admin`, `backup` and `restore`, as an operator types them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis

from app import cli
from app.domain.accounts import KEY_PREFIX, Caller
from app.domain.results import HOUR_S
from app.errors import Unauthorized
from app.services.tenants.authentication import Authenticator, project_of
from app.settings import EngineSettings, hash_key
from app.stores.objects.folder import FolderStore
from app.stores.pages import LedgerPage, PageFiles
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords
from tests.pages import age, in_mid_hour

Command = Callable[..., str]


@pytest.fixture
def tinsmith(client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command; returns its output."""

    def run(*arguments: str | Path) -> str:
        servers = ("--data-dir", str(tmp_path), "--redis", valkey)
        code = cli.main([*map(str, arguments), *servers])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out.strip()

    return run


@pytest.fixture
def caller_of(client: redis.Redis) -> Authenticator:
    return Authenticator((), RedisRecords(client), None)


def made(tinsmith: Command) -> tuple[str, str, str]:
    """Makes them; returns (project, user, key)."""
    organisation = tinsmith("admin", "org", "create", "Tinkers")
    project = tinsmith("admin", "project", "create", "kettles", "--org", organisation)
    user = tinsmith("admin", "user", "create", "jo@example.org", "--org", organisation)
    assert tinsmith("admin", "user", "role", user, project, "member") == f"{project}=member"
    return project, user, tinsmith("admin", "key", "create", "--user", user, "--name", "laptop", "--scopes", "train")


def test_ids_and_keys_are_printed_alone_and_work(tinsmith, caller_of):
    project, user, key = made(tinsmith)
    caller = caller_of(key)
    assert (caller.user, caller.project, caller.roles, caller.scopes) == (user, project, {project: "member"}, {"train"})
    everywhere = "\n".join(tinsmith("admin", kind, "list") for kind in ("org", "project", "user", "key"))
    for said in (project, user, caller.key_id, "Tinkers", "kettles", "jo@example.org", f"{project}=member", "laptop"):
        assert said in everywhere
    assert key.partition(".")[2] not in everywhere


def test_what_is_taken_away_stops(tinsmith, caller_of):
    project, user, key = made(tinsmith)
    for_reading = tinsmith("admin", "key", "create", "--user", user, "--scopes", "none", "--days", "0.5")
    assert caller_of(for_reading).scopes == frozenset()
    id_ = caller_of(key).key_id
    assert tinsmith("admin", "key", "revoke", id_) == f"{id_} was revoked"
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(key)
    assert tinsmith("admin", "user", "role", user, project, "none") == "in no project"
    assert caller_of(for_reading).roles == {}
    tinsmith("admin", "user", "remove", user)
    with pytest.raises(Unauthorized, match="removed"):
        caller_of(for_reading)
    assert "revoked" in tinsmith("admin", "key", "list")
    assert "removed" in tinsmith("admin", "user", "list")


def test_a_key_for_some_days_expires_and_the_list_says_so(tinsmith, caller_of):
    _, user, lasting = made(tinsmith)
    create = ("admin", "key", "create", "--user", user, "--days")
    for_days, expired = tinsmith(*create, "400"), tinsmith(*create, "1e-9")
    assert caller_of(for_days).user == user
    with pytest.raises(Unauthorized, match="expired"):
        caller_of(expired)
    lines = [line.split("\t") for line in tinsmith("admin", "key", "list").splitlines()[1:]]
    states = {id_: state for id_, _, _, _, state, *_ in lines}
    ids = [key.removeprefix(KEY_PREFIX).partition(".")[0] for key in (lasting, for_days, expired)]
    active, until, ended = (states[id_] for id_ in ids)
    assert (active, ended.partition(" ")[0]) == ("active", "expired")
    left = datetime.fromisoformat(until.removeprefix("until ")).replace(tzinfo=UTC) - datetime.now(UTC)
    assert 398 <= left.days <= 400


def test_a_key_expires_within_a_hundred_years(tinsmith, capsys):
    _, user, _ = made(tinsmith)
    create = ("admin", "key", "create", "--user", user, "--days")
    tinsmith(*create, "36500")
    assert "until " in tinsmith("admin", "key", "list")
    with pytest.raises(SystemExit):
        cli.main([*create, "36501"])
    assert "at most 36,500" in capsys.readouterr().err


def test_limits_are_set_lifted_and_listed(tinsmith, caller_of):
    project, _, key = made(tinsmith)
    id_ = caller_of(key).key_id
    said = tinsmith("admin", "limits", "set", project, "--live-models", "4", "--tokens-per-s", "none", "--weight", "2")
    assert said == "tokens_per_s=none live_models=4 weight=2.0"
    assert tinsmith("admin", "limits", "set", id_, "--requests-per-s", "0.5") == "requests_per_s=0.5"
    left = tinsmith("admin", "limits", "set", project, "--tokens-per-s", "default", "--live-models", "5")
    assert left == "live_models=5 weight=2.0"
    assert tinsmith("admin", "limits", "list").splitlines()[1:] == [f"{project}\t{left}", f"{id_}\trequests_per_s=0.5"]
    lines = [line.split("\t")[1:] for line in tinsmith("admin", "audit", project).splitlines()][-3:]
    assert [event for event, *_ in lines] == ["project_limits_set", "key_limits_set", "project_limits_set"]
    assert '"tokens_per_s": "default"' in lines[-1][1]
    with pytest.raises(SystemExit):
        cli.main(["admin", "limits", "set", project, "--live-models", "few"])


def test_usage_and_cost_of_a_month_are_listed_by_run(tinsmith, tmp_path, monkeypatch):
    settings = tmp_path / "priced.toml"
    settings.write_text("[prices]\ntraining = 2.0\ndevice_hour = 3.6\n")
    monkeypatch.setenv("TINSMITH_SETTINGS", str(settings))
    pages = PageFiles(FolderStore(tmp_path / "objects", "", ""))
    run = {"run training s:train:0 base": "500000", "training s base": "600000", "device s base": "2000"}
    others = {"sampling_prefill": 5, "sampling_prefill_cached": 3, "sampling_sample": 4, "storage": 18 * 10**11}
    for kind, amount in others.items():
        run |= {f"run {kind} s:train:0 base": str(amount), f"{kind} s base": str(amount)}
    first, last = (int(datetime(2025, 10, day, tzinfo=UTC).timestamp()) // HOUR_S for day in (1, 31))
    for hour in (first - 1, first, last + 23, last + 24):
        pages.add(LedgerPage("usage", "mine", hour), run)
    lines = [line.split("\t") for line in tinsmith("admin", "usage", "mine", "--month", "2025-10").splitlines()]
    assert lines[1:] == [
        ["s:train:0", "base", "1000000", "10", "6", "8", "0.000", "1.000000", "2.000000"],
        ["-", "base", "200000", "0", "0", "0", "4.000", "0.000000", "0.404000"],
        ["total", *[""] * 7, "2.404000"],
    ]
    assert tinsmith("admin", "usage", "mine").splitlines()[1:] == ["\t".join(["total", *[""] * 7, "-"])]
    with pytest.raises(SystemExit):
        cli.main(["admin", "usage", "mine", "--month", "2025-13"])


def test_a_project_of_the_settings_is_known_before_its_first_usage(tinsmith, tmp_path, monkeypatch):
    digest = hash_key("tml-0123456789")
    (tmp_path / "keys.toml").write_text(f'api_keys = ["{digest}"]\n')
    monkeypatch.setenv("TINSMITH_SETTINGS", str(tmp_path / "keys.toml"))
    assert tinsmith("admin", "usage", project_of(digest)).splitlines()[1:] == ["\t".join(["total", *[""] * 7, "-"])]
    assert tinsmith("admin", "audit", project_of(digest)) == ""


def test_rebuild_brings_accounts_back_to_an_emptied_state_server(tinsmith, caller_of, client):
    _, _, key = made(tinsmith)
    before = caller_of(key)
    client.flushall()
    assert "restored 4 organisations, projects, users and keys\n" in tinsmith("rebuild")
    assert caller_of(key) == before


def test_a_backup_brings_everything_back_where_both_stores_were_lost(tinsmith, caller_of, client, tmp_path):
    _, user, key = made(tinsmith)
    revoked = tinsmith("admin", "key", "create", "--user", user)
    tinsmith("admin", "key", "revoke", caller_of(revoked).key_id)
    before, lists = caller_of(key), [tinsmith("admin", kind, "list") for kind in ("org", "project", "user", "key")]
    file = tmp_path / "accounts.jsonl"
    assert tinsmith("backup", file).startswith("wrote 7 objects of ")
    assert file.stat().st_mode & 0o077 == 0
    assert key.partition(".")[2] not in file.read_text()

    client.flushall()
    shutil.rmtree(tmp_path / "objects")
    assert "of 7 objects 7 were missing" in tinsmith("restore", file)
    assert caller_of(key) == before
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(revoked)
    assert [tinsmith("admin", kind, "list") for kind in ("org", "project", "user", "key")] == lists
    assert "of 7 objects 0 were missing" in tinsmith("restore", file)


def test_an_older_backup_undoes_nothing(tinsmith, caller_of, tmp_path):
    _, _, key = made(tinsmith)
    file = tmp_path / "accounts.jsonl"
    tinsmith("backup", file)
    tinsmith("admin", "key", "revoke", caller_of(key).key_id)
    tinsmith("restore", file)
    with pytest.raises(Unauthorized, match="revoked"):
        caller_of(key)


def test_a_backup_holds_the_usage_and_the_audit_log_of_past_hours(tinsmith, client, tmp_path):
    in_mid_hour()
    project, _, _ = made(tinsmith)
    [page] = [page for page in age(client, 48) if page.project == project]
    day = f"{datetime.fromtimestamp(page.hour * HOUR_S, UTC):%Y-%m-%d}"
    files = PageFiles(FolderStore(tmp_path / "objects", "", ""))
    files.add(page, RedisPages(client, EngineSettings()).fields(page))
    files.add(replace(page, ledger="usage"), {"training s b": "1"})
    text = tinsmith("admin", "audit", project, "--day", day)
    assert [line.split("\t")[1] for line in text.splitlines()] == ["project_create", "project_role_set", "key_create"]
    tinsmith("backup", tmp_path / "file")
    client.flushall()
    shutil.rmtree(tmp_path / "objects")
    tinsmith("restore", tmp_path / "file")
    assert tinsmith("admin", "audit", project, "--day", day) == text
    assert tinsmith("admin", "audit", project) == "", "nothing was done today"
    assert files.find("usage", project, range(page.hour, page.hour + 1)) == {
        replace(page, ledger="usage"): {"training s b": "1"}
    }


def test_what_an_operator_does_to_an_organisation_is_in_its_audit_log(tinsmith):
    in_mid_hour()
    organisation = tinsmith("admin", "org", "create", "Tinkers")
    tinsmith("admin", "user", "create", "jo@example.org", "--org", organisation)
    text = tinsmith("admin", "audit", organisation)
    assert [line.split("\t")[1] for line in text.splitlines()] == ["organization_create", "user_create"]
    assert "jo@example.org" not in text


DAMAGES = {
    "cut short": (lambda text: text[: len(text) // 2], "damaged"),
    "without its end": (lambda text: text.rpartition('{"objects"')[0], "it was cut short"),
    "a line lost": (lambda text: "".join(text.splitlines(keepends=True)[:2] + text.splitlines(keepends=True)[3:]), ""),
    "of another kind": (lambda text: "x" + text, "line 1 is not the header of a backup"),
    "empty": (lambda text: "", "line 1 is not the header of a backup"),
    "with other objects": (lambda text: text.replace("accounts/", "models/", 1), "which is not in a backup"),
    "with a way out": (lambda text: text.replace("accounts/", "accounts/../", 1), "is not an object key"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_backup_changes_nothing(tinsmith, client, valkey, tmp_path, capsys, damage):
    change, said = DAMAGES[damage]
    made(tinsmith)
    file = tmp_path / "accounts.jsonl"
    tinsmith("backup", file)
    file.write_text(change(file.read_text()))
    client.flushall()
    shutil.rmtree(tmp_path / "objects")
    assert cli.main(["restore", str(file), "--data-dir", str(tmp_path), "--redis", valkey]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tinsmith: cannot restore {file}: ") and said in error
    assert not list((tmp_path / "objects").glob("[!.]*")) and client.dbsize() == 0


def test_a_damaged_object_is_named_and_no_backup_is_made(tinsmith, valkey, tmp_path, capsys):
    made(tinsmith)
    damaged = next((tmp_path / "objects/accounts/users").rglob("*.json"))
    damaged.write_bytes(b"\xff")
    assert cli.main(["backup", str(tmp_path / "file"), "--data-dir", str(tmp_path), "--redis", valkey]) == 2
    key = damaged.relative_to(tmp_path / "objects").as_posix()
    assert capsys.readouterr().err.startswith(f"tinsmith: {key} in the object store is damaged")
    assert not (tmp_path / "file").exists()


def test_a_backup_never_replaces_a_file(tinsmith, valkey, tmp_path, capsys):
    made(tinsmith)
    file = tmp_path / "kept"
    file.write_text("mine")
    assert cli.main(["backup", str(file), "--data-dir", str(tmp_path), "--redis", valkey]) == 2
    assert "name a new file" in capsys.readouterr().err
    assert file.read_text() == "mine"


WRONG = {
    ("admin", "project", "create", "x", "--org", "org-0"): "there is no organisation 'org-0'",
    ("admin", "user", "remove", "user-0"): "there is no user 'user-0'",
    ("admin", "key", "create", "--user", "../x"): "is not an object key",
    ("admin", "org", "create", ""): "'' is not a name",
    ("admin", "usage", "nope"): "there is no project 'nope'",
    ("admin", "audit", "nope"): "there is no project or organisation 'nope'",
    ("admin", "limits", "set", "nope", "--weight", "2"): "there is no project or key 'nope'",
    ("restore", "/no/such.json"): "cannot restore /no/such.json: No such file or directory",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_cannot_be_done_is_one_line_that_says_why(client, valkey, tmp_path, capsys, arguments):
    assert cli.main([*arguments, "--data-dir", str(tmp_path), "--redis", valkey]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines()), WRONG[arguments] in said.err) == ("", 1, True)


def test_a_key_for_one_of_several_projects_names_it(tinsmith, caller_of, valkey, tmp_path, capsys):
    project, user, _ = made(tinsmith)
    organisation = tinsmith("admin", "org", "list").splitlines()[1].split("\t")[0]
    other = tinsmith("admin", "project", "create", "pans", "--org", organisation)
    tinsmith("admin", "user", "role", user, other, "viewer")
    create = ["admin", "key", "create", "--user", user]
    assert cli.main([*create, "--data-dir", str(tmp_path), "--redis", valkey]) == 2
    assert "is in 2 projects: choose one for the key with --project" in capsys.readouterr().err
    caller: Caller = caller_of(tinsmith(*create, "--project", project))
    assert (caller.project, caller.roles) == (project, {project: "member", other: "viewer"})
