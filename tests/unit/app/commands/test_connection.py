"""Commands reach the stack that runs on a data folder, by the settings that its processes have."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from app import cli
from app.commands import connection
from app.settings import SETTINGS_VARIABLE
from app.stack.config import Options
from app.stack.data_folder import DataFolder


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """The data folder of a stack with servers of its own."""
    folder = tmp_path / "first"
    (folder / "run").mkdir(parents=True)
    servers = '[redis]\nurl = "redis://own:1/0"\nbroker_url = "redis://own:1/1"\n'
    (folder / "run" / "settings.toml").write_text(f'data_dir = "{folder}"\n{servers}')
    return Options(data_dir=folder)


def test_a_variable_of_the_shell_names_no_other_broker_than_the_stacks(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_BROKER_URL", "redis://other:1/1")
    assert connection.settings_of(options).broker_url == "redis://own:1/1"
    with closing(DataFolder(options.data_dir)):
        found = connection.environment(options)
    assert found[SETTINGS_VARIABLE] == str(options.data_dir / "run" / "settings.toml")
    assert found == {name: value for name, value in {**os.environ, **found}.items() if name != "TINSMITH_BROKER_URL"}


def test_a_config_file_without_servers_leads_another_process_to_those_of_the_stack(
    options: Options, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text("[prices]\ntraining = 2.0\n")
    with closing(DataFolder(options.data_dir)):
        found = connection.environment(replace(options, config=tmp_path / "mine.toml"))
    assert found[SETTINGS_VARIABLE] == str(options.data_dir / "run" / "settings.toml")


def test_the_keys_of_another_object_store_come_from_the_environment(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_S3_ACCESS_KEY", "access")
    monkeypatch.setenv("TINSMITH_S3_SECRET_KEY", "secret")
    found = connection.settings_of(replace(options, s3="http://other:9000/bucket"))
    assert (found.redis.url, found.store.url) == ("redis://own:1/0", "http://other:9000/bucket")
    assert (found.store.access_key, found.store.secret_key) == ("access", "secret")


@pytest.mark.parametrize(
    "command", ["status", "top", "logs session:train:0:7", "cancel session", "rebuild", "admin org list", "flower"]
)
def test_a_stack_that_has_stopped_is_named(command: str, options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    folder = options.data_dir
    assert folder is not None
    settings = folder / "run" / "settings.toml"
    settings.write_text(settings.read_text().replace("own:1", "127.0.0.1:1"))
    assert cli.main([*command.split(), "--data-dir", str(folder)]) == 2
    said = f"tinsmith: the stack on {folder} is not running: start `tinsmith up --data-dir {folder}`\n"
    assert capsys.readouterr().err == said


def test_another_server_that_is_away_is_named_and_not_the_stopped_stack(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--data-dir", str(options.data_dir), "--redis", "redis://127.0.0.1:1/0"]) == 2
    said = capsys.readouterr().err
    assert "the state server redis://127.0.0.1:1/0 failed" in said and "is not running" not in said


@pytest.mark.parametrize(
    "command",
    [
        *("status", "top", "logs session:train:0:7", "cancel session --yes", "rebuild", "restore file", "flower"),
        *("admin org list", "admin org create name", "import folder --base-model base"),
    ],
)
@pytest.mark.parametrize("take", ["copy", "move"])
def test_a_copied_or_moved_folder_does_not_lead_to_the_stack_of_the_first(
    take: str, command: str, options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    if take == "copy":
        shutil.copytree(options.data_dir, taken)
    else:
        options.data_dir.rename(taken)
    assert cli.main([*command.split(), "--data-dir", str(taken)]) == 2
    assert capsys.readouterr().err == (
        f"tinsmith: the data folder {taken} was copied or moved from {options.data_dir}, so its settings may name "
        f"servers of another stack: start `tinsmith up --data-dir {taken}` once, which writes them anew\n"
    )


def test_a_config_file_that_names_the_state_server_leads_to_the_keys_and_models_that_the_stack_added(
    options: Options, tmp_path: Path
) -> None:
    written = options.data_dir / "run" / "settings.toml"
    keys = f'api_keys = ["{"a" * 64}"]\n'
    written.write_text(keys + written.read_text() + '[[base_models]]\nname = "bundled"\npath = "x"\n')
    (tmp_path / "mine.toml").write_text('[redis]\nurl = "redis://own:1/0"\n')
    named = replace(options, config=tmp_path / "mine.toml")
    with closing(DataFolder(options.data_dir)):
        found = connection.settings_of(named)
        assert (found.api_keys, [base.name for base in found.base_models]) == (("a" * 64,), ["bundled"])
        (tmp_path / "mine.toml").write_text('[redis]\nurl = "redis://other:1/0"\n')
        assert connection.settings_of(named).api_keys == ()
    (tmp_path / "mine.toml").write_text('[redis]\nurl = "redis://own:1/0"\n')
    assert connection.settings_of(named).api_keys == (), "a stack that has stopped may start with another config file"


@pytest.mark.parametrize("command", ["status", "rebuild", "admin org list"])
def test_a_user_who_may_not_read_the_data_folder_is_told_so(
    command: str, options: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """root may read everything, so here the kernel's refusal is imitated."""
    stat = Path.stat

    def refuse_the_folder(path: Path, **how: bool) -> os.stat_result:
        if options.data_dir in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refuse_the_folder)
    assert cli.main([*command.split(), "--data-dir", str(options.data_dir)]) == 2
    said = f"tinsmith: cannot read {options.data_dir}/run/settings.toml: Permission denied; run this command as the "
    error = capsys.readouterr().err
    assert (error.startswith(said), error.count("\n")) == (True, 1), error


def test_a_folder_has_many_paths(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(options.data_dir)
    monkeypatch.chdir(tmp_path)
    for path in ("link", "first", "first/../first"):
        assert connection.settings_of(Options(data_dir=Path(path))).data_dir == options.data_dir


def test_a_stack_in_a_container_may_have_another_path_for_the_folder(options: Options, tmp_path: Path) -> None:
    mounted = options.data_dir.rename(tmp_path / "mounted")
    with closing(DataFolder(mounted)):
        assert connection.settings_of(Options(data_dir=mounted)).data_dir == options.data_dir


def test_a_stack_that_is_starting_on_a_copy_is_not_taken_for_the_first(options: Options, tmp_path: Path) -> None:
    taken = shutil.copytree(options.data_dir, tmp_path / "taken")
    with closing(DataFolder(taken)):
        assert connection.planned(Options(data_dir=taken))[1] is None


def test_a_server_that_fails_under_a_running_stack_is_named(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = options.data_dir
    assert folder is not None
    settings = folder / "run" / "settings.toml"
    settings.write_text(settings.read_text().replace("own:1", "127.0.0.1:1"))
    with closing(DataFolder(folder)):
        assert cli.main(["status", "--data-dir", str(folder)]) == 2
    assert "the state server redis://127.0.0.1:1/0 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["foo", "127.0.0.1:1", "http://x", "unix:///run/redis.sock", "redis://h:abc/0", "redis+sentinel://a/s"]
)
@pytest.mark.parametrize("command", ["status", "rebuild", "logs session:train:0:7", "cancel session"])
def test_what_is_no_url_of_redis_is_refused(
    command: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINSMITH_REDIS_URL", url)
    monkeypatch.setenv("TINSMITH_BROKER_URL", "redis://127.0.0.1:1/1")
    assert cli.main([*command.split(), "--data-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "redis.url: give the URL of a Redis server" in said or "the URL must be of the form redis+sentinel" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        *("rebuild", "admin org list", "admin org create name", "admin audit project", "admin usage project"),
        "import folder --base-model base",
    ],
)
def test_a_command_changes_nothing_where_the_object_store_is_not_that_of_the_state_server(
    command: str, client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = ["--data-dir", str(tmp_path), "--redis", valkey]
    assert cli.main(["admin", "org", "create", "first", *servers]) == 0
    (tmp_path / "objects").rename(tmp_path / "unmounted")
    keys, _ = sorted(client.keys()), capsys.readouterr()
    assert cli.main([*command.split(), *servers]) == 2
    assert "is not the one of the state server" in capsys.readouterr().err
    assert sorted(client.keys()) == keys and not list(tmp_path.glob("objects/[!.]*"))
