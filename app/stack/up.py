"""Runs `tinsmith up`, from its options to its exit code, with the table of the processes that it starts."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis
import tomli_w

from app.demo import model
from app.domain.accounts import KEY_PREFIX
from app.domain.records import LAST_WORKERS, Refusal, Worker
from app.errors import SetupError
from app.services.base_models import BaseModels, lora_coverage, roles
from app.settings import (
    METRICS_PORT_VARIABLE,
    NO_VLLM,
    SETTINGS_VARIABLE,
    ApiSettings,
    BaseModelSettings,
    SamplerSettings,
    Settings,
    TrainerSettings,
    hash_key,
    netloc,
)
from app.stack import checks, config, hardware, placement, ports, valkey
from app.stack.child import Command
from app.stack.config import Options
from app.stack.data_folder import DataFolder, unwritable, write_private
from app.stack.run_news import RunNews
from app.stack.signals import StopFlag, interrupted_by, stop_signals
from app.stack.supervisor import Supervisor
from app.stack.terminal import show, warn
from app.stores import objects
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords
from app.stores.store_id import check_store_id

_LOCALHOST = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would look on its own machine
_PROBE_TIMEOUT_S = 2.0
_NEWS_EVERY_S = 60.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY_FILE = "api-key"
_API = "api"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# By the section of the settings: the first part of a worker's name, and its command.
_WORKERS = {
    "trainer": ("trainer", "workers.trainer"),
    "full": ("full-trainer", "workers.trainer", "--full"),
    "sampler": ("sampler", "workers.sampler"),
    "full_sampler": ("full-sampler", "workers.sampler", "--full"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a stack: the settings as every process reads them, their file, and the embedded servers, if any."""

    settings: Settings
    settings_file: Path
    servers: tuple[Command, ...]


def up(options: Options) -> int:
    """Runs the stack until SIGINT, SIGTERM or (except under nohup) SIGHUP, and returns 0 after such a stop.

    Raises SetupError when something must be changed first, TinsmithError when a process keeps dying, and
    KeyboardInterrupt after such a signal before the stack starts.
    """
    settings = config.resolve(options, os.environ)
    ports.listen_port(settings.api)
    say = _teller(options)
    with _private_files(), closing(DataFolder(settings.data_dir)) as folder, _full_disk_named(folder):
        with interrupted_by(*_STOP_SIGNALS):  # it may fetch a model for minutes
            plan = prepare(settings, options, folder)
        _warn_of_faults(plan.settings)
        say(f"data in {folder.root}, logs in {folder.logs}{_key_notice(settings, folder)}")
        with (
            stop_signals(*_STOP_SIGNALS) as stopping,
            _cleared_transfers(plan.settings),
            Supervisor(folder.logs, stopping, inherited_fds=(folder.lock_fd,)) as supervisor,
        ):
            _run(supervisor, plan, say, None if options.quiet else stopping)
    return 0


@contextmanager
def _full_disk_named(folder: DataFolder) -> Iterator[None]:
    """A context in which a disk that takes no more raises SetupError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise unwritable(folder.root, error) from None


def _warn_of_faults(settings: Settings) -> None:
    """Prints the faults that the stack can run with."""
    if checks.lacks_vllm(settings):
        warn(NO_VLLM)
    for line in (
        *checks.unused_gpus(),
        *checks.short_of_shared_memory(settings),
        *checks.unreachable_links(settings),
    ):
        warn(line)


def _teller(options: Options) -> Callable[[str], None]:
    """Returns the function that prints a line which is not a warning."""
    return (lambda _: None) if options.quiet else warn


def prepare(
    settings: Settings,
    options: Options,
    folder: DataFolder,
    gpus: Callable[[], Sequence[int]] = lambda: hardware.emptiest_first(hardware.visible_gpus(os.environ)),
) -> Plan:
    """Completes the settings (model, port, secrets, GPUs, embedded server), checks them and writes them for the
    processes. `gpus` numbers the GPUs that workers may use, and those with the least memory in use come first."""
    bundled = not settings.base_models
    if bundled:
        base = BaseModelSettings(
            name=model.NAME,
            path=str(model.folder(folder.models)),
            trainer=TrainerSettings(memory_share=hardware.SHARED),
            sampler=SamplerSettings(memory_share=hardware.SHARED),
        )
        settings = settings.model_copy(update={"base_models": (base,)})
    settings = _with_secrets(config.for_every_base_model(_absolute(settings, folder), options), folder)
    checks.everything(settings)
    settings = placement.place(settings, gpus)
    if bundled:
        model.ensure(folder.models, _teller(options))
    else:
        checks.model_paths(settings)
    settings, servers = _with_servers(settings, folder)
    settings_file = folder.run / "settings.toml"
    write_private(settings_file, tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True)))
    return Plan(settings, settings_file, servers)


def _run(supervisor: Supervisor, plan: Plan, say: Callable[[str], None], until: StopFlag | None) -> None:
    """Starts the processes and watches them. With `until`, prints news of runs until it is set."""
    if not _start_servers(supervisor, plan):
        return
    workers = _start_workers(supervisor, plan, say)
    if _wait_until_ready(supervisor, plan.settings, workers, say):
        if until is not None:
            _follow_runs(plan.settings.redis.url, say, until)
        supervisor.run()
    say("stopping")


def _start_servers(supervisor: Supervisor, plan: Plan) -> bool:
    """Starts the embedded servers. Returns True once the state server and the broker answer, False after a stop."""
    redis_url, broker_url = plan.settings.redis.url, plan.settings.broker_url
    supervisor.start(plan.servers)
    if not supervisor.run_until(lambda: valkey.answers(redis_url) and valkey.answers(broker_url)):
        return False
    supervisor.note_ready({command.name for command in plan.servers})
    return True


def _start_workers(supervisor: Supervisor, plan: Plan, say: Callable[[str], None]) -> set[str]:
    """Starts the API and the workers. Returns the names of the workers. Raises SetupError when the object store is not
    that of the state server."""
    table = process_table(plan.settings, plan.settings_file)
    file = plan.settings_file.with_name("metrics-ports.json")
    commands = ports.with_metrics_ports(table, file, {plan.settings.api.port})
    with connect(plan.settings.redis.url) as client:
        records = RedisRecords(client)
        # Each process checks it too. Here it is one line before any model is loaded.
        check_store_id(plan.settings, records, objects.create(plan.settings, may_be_away=True))
        _forget_workers(records, plan.settings, commands)
    say(f"starting {', '.join(command.name for command in (*plan.servers, *commands))}")
    for name, metrics_url in ports.metrics_urls(commands).items():
        say(f"metrics of {name}: {metrics_url}")
    supervisor.start(commands)
    return {command.name for command in commands if command.name != _API}


def _wait_until_ready(
    supervisor: Supervisor, settings: Settings, workers: set[str], say: Callable[[str], None]
) -> bool:
    """Returns True once requests are served, False after a stop. Prints what becomes ready. Raises SetupError when none
    of the workers can serve its base model."""
    url = _local_url(settings.api)
    with connect(settings.redis.url) as client:
        bases = BaseModels(settings, RedisRecords(client))
        starting = _Starting(workers, say)

        def is_ready() -> bool:
            if workers <= supervisor.ended:
                raise SetupError("none of the base models can be served; give another with --base-model NAME=PATH")
            with suppress(redis.RedisError):  # it may be starting again
                ready = _here(bases.workers())
                supervisor.note_ready(ready)
                starting.look(ready, supervisor.ended)
            return _is_ready(url)

        if not supervisor.run_until(is_ready):
            return False
        starting.look(_here(bases.workers()), supervisor.ended)
        _say_base_models(settings, bases, say)
        with suppress(OSError):  # nobody reads it any more
            show(f"ready {url}")
    return True


def _follow_runs(redis_url: str, say: Callable[[str], None], until: StopFlag) -> None:
    """Prints news of runs from a thread of its own: a state server that hangs must not keep dead processes waiting."""
    client = connect(redis_url)
    news = RunNews(RedisRecords(client), client, say)
    threading.Thread(target=news.follow, args=(until,), name="news", daemon=True).start()


def _here(nodes: Iterable[str]) -> set[str]:
    """The names of this machine's workers among Celery's node names, name@host. A worker with ranks on several machines
    has the host name of its first rank."""
    own = f"@{socket.gethostname()}"
    return {node.removesuffix(own) for node in nodes if node.endswith(own)}


class _Starting:
    """Prints once for each worker that it is ready, and each minute which workers are not."""

    def __init__(self, names: Iterable[str], say: Callable[[str], None]) -> None:
        self._missing, self._say = set(names), say
        self._began = time.monotonic()
        self._next_news_s = _NEWS_EVERY_S

    def look(self, ready: Set[str], ended: Set[str]) -> None:
        """`ready` and `ended`: the names of the workers that serve, and of those that are not started again."""
        for name in sorted(self._missing & ready):
            self._say(f"{name} is ready after {time.monotonic() - self._began:.0f} s")
            self._missing.remove(name)
        waited_s = time.monotonic() - self._began
        if (awaited := sorted(self._missing - ended)) and waited_s >= self._next_news_s:
            self._next_news_s += _NEWS_EVERY_S
            self._say(f"after {waited_s:.0f} s still waiting for {', '.join(awaited)}; see its log")


def _say_base_models(settings: Settings, bases: BaseModels, say: Callable[[str], None]) -> None:
    """Says of each base model that has a trainer which weights LoRA adapters cover, and why it computes in float32."""
    for base, running in zip(settings.base_models, bases.capabilities(), strict=True):
        if running["trainable"]:
            say(f"{base.name}: {lora_coverage(running)}")
        if base.dtype == "auto" and running["dtype"] == "float32":
            warn(
                f"{base.name}: in float32, because this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16), "
                "which is far slower without them"
            )


def _forget_workers(records: RedisRecords, settings: Settings, commands: list[Command]) -> None:
    """Deletes the records of a killed stack's workers, which would make /readyz answer too early, and the refusals and
    facts of former workers.

    A worker's record has Celery's node name, name@host, so records of another machine on the same Redis stay.
    """
    for command in commands:
        records.delete(Worker.namespace, f"{command.name}@{socket.gethostname()}")
    for base in settings.base_models:
        for role in roles(base):
            for namespace in (Refusal.namespace, LAST_WORKERS):
                records.delete(namespace, Refusal.id(role, base.name))


def _absolute(settings: Settings, folder: DataFolder) -> Settings:
    """Settings with absolute paths, which mean the same in every process, and with the port that the API will listen
    on."""
    bases = tuple(_absolute_path(base) for base in settings.base_models)
    api = settings.api.model_copy(update={"port": ports.listen_port(settings.api)})
    return settings.model_copy(update={"data_dir": folder.root, "base_models": bases, "api": api})


def _absolute_path(base: BaseModelSettings) -> BaseModelSettings:
    path = Path(base.path).expanduser()
    return base.model_copy(update={"path": str(path.absolute())}) if path.is_dir() else base


def _with_secrets(settings: Settings, folder: DataFolder) -> Settings:
    url_secret = settings.url_secret or folder.kept_secret("url-secret", lambda: secrets.token_urlsafe(32))
    if settings.api_keys:
        return settings.model_copy(update={"url_secret": url_secret})
    key = hash_key(folder.kept_secret(_KEY_FILE, lambda: KEY_PREFIX + secrets.token_urlsafe(32)))
    return settings.model_copy(update={"api_keys": (key,), "operator_keys": (key,), "url_secret": url_secret})


def _key_notice(given: Settings, folder: DataFolder) -> str:
    return "" if given.api_keys else f", the API key in {folder.root / _KEY_FILE}"


def _with_servers(settings: Settings, folder: DataFolder) -> tuple[Settings, tuple[Command, ...]]:
    """Adds embedded state and broker servers, unless a state server is given."""
    if settings.redis.url:
        return settings, ()
    password = folder.kept_secret("valkey-password", lambda: secrets.token_urlsafe(32))
    files = {name: folder.run / f"{name}.conf" for name in ("valkey", "broker")}
    state = valkey.free_port(files["valkey"], {settings.api.port})  # nothing listens there yet
    broker = valkey.free_port(files["broker"], {settings.api.port, state})
    urls = {"url": valkey.url(state, password), "broker_url": valkey.url(broker, password)}
    servers = (
        valkey.command("valkey", folder.valkey, files["valkey"], state, password, valkey.DURABLE),
        valkey.command("broker", folder.valkey, files["broker"], broker, password, valkey.FORGETFUL),
    )
    return settings.model_copy(update={"redis": settings.redis.model_copy(update=urls)}), servers


def _local_url(api: ApiSettings) -> str:
    """The URL of the API for clients on this machine."""
    return f"http://{netloc(_LOCALHOST.get(api.host, api.host), api.port)}"


def _is_ready(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/readyz", timeout=_PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def _cleared_transfers(settings: Settings) -> Iterator[None]:
    """Removes the folder for shared-memory transfer at the end, because its memory stays in use. A folder that the user
    chose stays. After a killed stack, the trainers of the next stack continue with the files left there."""
    try:
        yield
    finally:
        if not settings.engine.handover_dir:
            shutil.rmtree(settings.handover_dir, ignore_errors=True)


@contextmanager
def _private_files() -> Iterator[None]:
    """Keeps the files of this process and its children from other users: Valkey's append-only file and every log hold
    data of tenants."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def process_table(settings: Settings, settings_file: Path) -> Iterator[Command]:
    """The commands of all processes. Node names are numbered across all base models, so each name is unique on this
    machine."""
    yield _python(_API, settings_file, "app.server", "-c", "python:app.gunicorn_conf", "app.wsgi:application")
    for section, (role, module, *options) in _WORKERS.items():
        for index, (base, copy) in enumerate(_copies(settings, section)):
            node = f"{role}-{index}"
            command = (module, "--base", base.name, "--name", node, "--copy", str(copy), *options)
            yield _python(node, settings_file, *command, **_metrics_port(base.workers[section], copy))


def _copies(settings: Settings, section: str) -> Iterator[tuple[BaseModelSettings, int]]:
    """The base model and the number of each worker of a section. Each base model's numbers begin at 0."""
    for base in settings.base_models:
        if section in base.workers:
            yield from ((base, copy) for copy in range(base.workers[section].count))


def _metrics_port(workers: TrainerSettings | SamplerSettings, copy: int) -> dict[str, str]:
    """The environment of a worker that has its port from the settings, or that a hostfile puts on another machine."""
    if workers.metrics_port:
        return {METRICS_PORT_VARIABLE: str(workers.metrics_port + copy)}
    return {METRICS_PORT_VARIABLE: ports.ANY_PORT} if getattr(workers, "hostfile", "") else {}


def _python(name: str, settings_file: Path, *arguments: str, **environ: str) -> Command:
    return Command(name, (sys.executable, "-m", *arguments), {SETTINGS_VARIABLE: str(settings_file), **environ})
