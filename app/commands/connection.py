"""Finds the servers for a command that works on a stack from outside, and names them in its output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import redis

from app import settings as settings_module
from app.errors import SetupError
from app.services.tenants.accounts import AccountService
from app.settings import SETTINGS_VARIABLE, Settings
from app.stack import checks, config, valkey
from app.stack.config import Options
from app.stack.data_folder import is_in_use
from app.stack.redaction import without_secrets
from app.stores.objects import create
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.base import ObjectStore
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords
from app.stores.store_id import check_store_id


def settings_of(options: Options) -> Settings:
    """The settings of the stack that runs on the data folder, unless another state server is given. Without --config it
    reads the file that TINSMITH_SETTINGS names, as every process of a stack does. Raises SetupError when no stack has
    run there, and when the folder is a copy or was moved: its settings name the servers of the first folder."""
    folder, settings = _found(options)
    # A stack in a container has another path for its folder.
    if not _is_at(settings, folder) and not is_in_use(folder):
        raise SetupError(
            f"the data folder {folder} was copied or moved from {settings.data_dir}, so its settings may name servers "
            f"of another stack: start `tinsmith up --data-dir {folder}` once, which writes them anew"
        )
    return settings


def settings_of_store(options: Options) -> Settings:
    """As `settings_of`, for a command that contacts no state server: it reads the objects of a copied or moved folder
    where they now are."""
    folder, settings = _found(options)
    return settings if _is_at(settings, folder) else settings.model_copy(update={"data_dir": folder.expanduser()})


def planned(options: Options) -> tuple[Settings, Settings | None]:
    """The settings of the options, and those of the stack that runs on their data folder, if one does. As with
    `settings_of`, TINSMITH_SETTINGS may name the file; `tinsmith up` does not read it."""
    settings = config.resolve(_named(options), os.environ)
    written = _written(settings)
    if not is_in_use(settings.data_dir) or not _is_there(written):
        return settings, None
    running = settings_module.load(written, {})
    return settings, running if _is_at(running, settings.data_dir) else None  # a stack that starts on a copy


def _found(options: Options) -> tuple[Path, Settings]:
    """The data folder, and the settings of `settings_of`, which may be those of another folder."""
    settings = config.resolve(_named(options), os.environ)
    folder, written = settings.data_dir, _written(settings)
    if settings.redis.url and not _is_of(settings, written):
        return folder, settings
    if not _is_there(written):
        raise SetupError(
            f"no stack has run on {folder}: start `tinsmith up` on it first, or name the state server in a "
            "file with --config"
        )
    if options.s3 is None:
        return folder, settings_module.load(written, {})
    running = settings_module.load(written)  # the environment has the keys of that server
    return folder, running.model_copy(update={"store": running.store.model_copy(update={"url": options.s3})})


def _is_of(settings: Settings, written: Path) -> bool:
    """True if the written settings are those of a stack that runs on this data folder with this state server:
    `tinsmith up` has added keys, secrets and a base model to those of its config file and options."""
    if not is_in_use(settings.data_dir) or not os.access(written, os.R_OK):  # a stack that starts has not written them
        return False
    stack = settings_module.load(written, {})
    return stack.redis.url == settings.redis.url and _is_at(stack, settings.data_dir)


def _is_there(file: Path) -> bool:
    """True if the file exists. Raises SetupError where this user may not know."""
    try:
        file.stat()
    except PermissionError:
        raise SetupError(
            f"cannot read {file}: Permission denied; run this command as the user that runs the stack"
        ) from None
    except OSError:
        return False
    return True


def _is_at(settings: Settings, folder: Path) -> bool:
    """True if the settings are those of a stack on the folder, which may have many paths."""
    return settings.data_dir.expanduser().resolve() == folder.expanduser().resolve()


def environment(options: Options) -> dict[str, str]:
    """The environment in which another process reads the same settings, for `options` that name no servers. Raises
    SetupError as `settings_of` does, where only the environment names a server, and where the stack has stopped."""
    running = settings_of(options)
    if not valkey.answers(running.broker_url):
        _check_not_stopped(running)
    named = _named(options).config
    if named and settings_module.load(named).redis.url:
        return {**os.environ, SETTINGS_VARIABLE: str(named)}
    file = _written(running)
    if not _is_there(file):
        raise SetupError(f"there is no {file}; name the settings of the stack with --config")
    return {**settings_module.without_secret_variables(os.environ), SETTINGS_VARIABLE: str(file)}


def _named(options: Options) -> Options:
    """Options with the config file that TINSMITH_SETTINGS names, unless they have one."""
    named = os.environ.get(SETTINGS_VARIABLE)
    return replace(options, config=Path(named)) if options.config is None and named else options


def _written(settings: Settings) -> Path:
    """The settings that `tinsmith up` wrote for its processes."""
    return settings.data_dir.expanduser() / "run" / "settings.toml"


def account_service(settings: Settings, objects: ObjectStore) -> AccountService:
    """Builds the account service. It does not contact the state server yet."""
    return AccountService(AccountFiles(objects), RedisRecords(connect(settings.redis.url), settings.engine))


def check_state_server(settings: Settings) -> None:
    """Checks that the state server answers and keeps what it acknowledges. Raises SetupError, which names the stack if
    it has stopped."""
    try:
        checks.state_server(settings.redis.url)
    except SetupError:
        _check_not_stopped(settings)
        raise


def open_store(settings: Settings, *, may_be_away: bool = False) -> ObjectStore:
    """Checks both servers, and returns the object store: see `stores.objects.create`. Raises SetupError too when the
    store is not the one whose files the state server records."""
    check_state_server(settings)
    objects = create(settings, may_be_away=may_be_away)
    with connected(settings) as client:
        check_store_id(settings, RedisRecords(client, settings.engine), objects)
    return objects


@contextmanager
def connected(settings: Settings) -> Iterator[redis.Redis]:
    """A client of the state server, in a context as that of `reached`."""
    try:
        client = connect(settings.redis.url)
    except ValueError as error:
        raise SetupError(f"cannot use Redis at {without_secrets(settings.redis.url)}: {error}") from None
    with reached(settings), client:
        yield client


@contextmanager
def reached(settings: Settings) -> Iterator[None]:
    """A context in which a failure of the state server raises SetupError."""
    try:
        yield
    except redis.RedisError as error:
        _check_not_stopped(settings)
        raise SetupError(
            f"the state server {without_secrets(settings.redis.url)} failed: {error}; fix it and run this command again"
        ) from None


def _check_not_stopped(settings: Settings) -> None:
    """Raises SetupError if the state server is that of a stack which ran on the data folder and has stopped."""
    file, folder = _written(settings), settings.data_dir
    if (
        not os.access(file, os.R_OK)
        or is_in_use(folder)
        or settings_module.load(file, {}).redis.url != settings.redis.url
    ):
        return
    raise SetupError(f"the stack on {folder} is not running: start `tinsmith up --data-dir {folder}`")
