"""`tinsmith up` with its processes replaced by one small web server. Settings, Valkey and supervision are real."""

from __future__ import annotations

import io
import os
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from urllib.parse import urlsplit

import pytest
import redis

from app import settings as settings_module
from app.domain.records import BaseModelInfo, Model, Worker
from app.services.base_models import BaseModels
from app.settings import BaseModelSettings, Settings, hash_key
from app.stack import ports, up
from app.stack.child import Child, Command
from app.stack.config import Options, resolve
from app.stack.data_folder import DataFolder
from app.stack.up import Plan, prepare
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, dump
from tests.processes.app.stack.running import alive, eventually, start
from tests.servers import free_port, start_valkey


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return folder


def plan(data_dir: Path, model: Path, environ: Mapping[str, str] = MappingProxyType({}), **options) -> Plan:
    given = Options(data_dir=data_dir, port=0, base_models=(("small", str(model)),), **options)
    with closing(DataFolder(data_dir)) as folder:
        return prepare(resolve(given, environ), given, folder)


@contextmanager
def stack(data_dir: Path, model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `tinsmith up` and the first line it prints."""
    port = str(free_port())
    process = start("up", "--port", port, "--data-dir", str(data_dir), "--base-model", f"small={model}", *options)
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Running:
    """A stack that no test stops."""

    data_dir: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def shared(tmp_path_factory, model) -> Iterator[Running]:
    data_dir = tmp_path_factory.mktemp("shared") / "data"
    with stack(data_dir, model) as (process, _):
        yield Running(data_dir, process)


def state_server(data_dir: Path) -> redis.Redis:
    return redis.Redis.from_url(written(data_dir).redis.url)


def written(data_dir: Path) -> Settings:
    return settings_module.load(data_dir / "run" / "settings.toml", {})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_process_reads_the_settings_that_were_resolved(tmp_path, model):
    made = plan(tmp_path / "data", model, zero_stage=1)
    assert settings_module.load(made.settings_file, {}) == made.settings
    assert made.settings.base_models[0].trainer.zero_stage == 1
    assert made.settings.api.port > 0
    assert made.settings.data_dir.is_absolute()


def read_by_a_process(made: Plan, log: Path) -> Settings:
    program = "from app.settings import from_environment; print(from_environment().model_dump_json())"
    environ = {settings_module.SETTINGS_VARIABLE: str(made.settings_file)}
    child = Child(Command("reader", (sys.executable, "-c", program), environ), log)
    child.start()
    assert eventually(lambda: child.exit_code() is not None)
    return Settings.model_validate_json(log.read_text())


def test_an_option_overrides_a_variable_also_in_the_processes(tmp_path, model, monkeypatch):
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://environment:6379/0")
    monkeypatch.setenv("TINSMITH_BROKER_URL", "redis://environment:6379/1")
    monkeypatch.setenv("TINSMITH_API_KEY", "tml-from-the-environment")
    monkeypatch.setenv("TINSMITH_OPERATOR_KEY", "tml-operator")
    with start_valkey(tmp_path / "state") as url:
        made = plan(tmp_path / "data", model, os.environ, redis=url, api_key="tml-0123456789")
    assert made.settings.redis.url == url
    assert made.settings.api_keys == (hash_key("tml-0123456789"), hash_key("tml-operator"))
    assert read_by_a_process(made, tmp_path / "log") == made.settings


def test_the_processes_use_no_broker_that_a_variable_names_beside_the_embedded_servers(tmp_path, model, monkeypatch):
    monkeypatch.setenv("TINSMITH_BROKER_URL", "redis://environment:6379/1")
    made = plan(tmp_path / "data", model, os.environ)
    assert "127.0.0.1" in made.settings.broker_url
    assert read_by_a_process(made, tmp_path / "log") == made.settings


def test_no_two_servers_have_the_same_port_though_none_listens_yet(tmp_path, model, monkeypatch):
    found = iter([7001, 7001, 7002, 7002, 7001, 7003])
    monkeypatch.setattr(ports, "free_port", lambda host, port: next(found))
    made = plan(tmp_path / "data", model)
    servers = [urlsplit(url).port for url in (made.settings.redis.url, made.settings.broker_url)]
    assert [made.settings.api.port, *servers] == [7001, 7002, 7003]


def test_files_that_hold_secrets_are_readable_by_their_owner_only(tmp_path, model):
    made = plan(tmp_path / "data", model)
    for name in ("api-key", "url-secret", "valkey-password", "run/settings.toml", "run/valkey.conf", "run/broker.conf"):
        assert mode(tmp_path / "data" / name) == 0o600
    password = (tmp_path / "data" / "valkey-password").read_text().strip()
    assert not [server for server in made.servers if password in " ".join(server.argv)]


def test_no_other_user_reads_any_file_of_a_running_stack(tmp_path, model):
    data = tmp_path / "data"
    umask = os.umask(0o022)
    try:
        with stack(data, model), state_server(data) as client:
            client.set("text", "training data")
            files = [path for path in data.rglob("*") if path.is_file()]
    finally:
        os.umask(umask)
    assert {"appendonlydir", "logs"} <= {path.parent.name for path in files}
    assert [(path, oct(mode(path))) for path in [data, *files] if mode(path) & 0o077] == []


def test_secrets_given_as_options_are_not_in_the_list_of_processes(tmp_path, model):
    with stack(tmp_path / "first", model), state_server(tmp_path / "first") as client:
        settings = written(tmp_path / "first")
        secrets = ["tml-0123456789", urlsplit(settings.redis.url).password]
        store = (tmp_path / "first" / "objects").as_uri()
        options = ("--api-key", secrets[0], "--redis", settings.redis.url, "--s3", store)
        with stack(tmp_path / "data", model, *options) as (process, said):
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        assert client.ping()
    assert said.startswith("ready ") and "--api-key" in line and "redis://:xxx" in line
    assert [secret for secret in secrets if secret in line] == []
    assert written(tmp_path / "data").api_keys == (hash_key(secrets[0]),), "it was read all the same"


def test_keys_and_secrets_survive_a_restart(tmp_path, model):
    first, second = (plan(tmp_path / "data", model).settings for _ in range(2))
    assert (first.api_keys, first.url_secret) == (second.api_keys, second.url_secret)
    key = (tmp_path / "data" / "api-key").read_text().strip()
    assert key.startswith("tml-") and first.api_keys == first.operator_keys == (hash_key(key),)


def test_a_given_key_leaves_no_key_file(tmp_path, model):
    settings = plan(tmp_path / "data", model, api_key="tml-0123456789").settings
    assert (settings.api_keys, settings.operator_keys) == ((hash_key("tml-0123456789"),), ())
    assert not (tmp_path / "data" / "api-key").exists()


def test_an_outside_redis_starts_no_embedded_one(shared, tmp_path, model):
    url = written(shared.data_dir).redis.url
    made = plan(tmp_path / "data", model, redis=url)
    assert made.servers == () and made.settings.redis.url == url


def test_the_embedded_server_loses_nothing_and_asks_for_a_password(shared):
    with state_server(shared.data_dir) as client:
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        assert client.config_get(*wanted) == wanted
        port = client.connection_pool.connection_kwargs["port"]
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()


def test_the_embedded_broker_keeps_nothing(shared):
    with connect(written(shared.data_dir).broker_url) as client:
        assert client.config_get("appendonly", "save") == {"appendonly": "no", "save": ""}


def test_ready_is_one_line_and_a_signal_ends_everything_with_0(tmp_path, model):
    with stack(tmp_path / "data", model) as (process, line):
        assert line == f"ready {written(tmp_path / 'data').public_url}\n"
        with state_server(tmp_path / "data") as client:
            server = client.info("server")["process_id"]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
        assert (process.returncode, rest) == (0, "")
        assert not alive(server)


@dataclass(frozen=True)
class FirstStart:
    """A first `tinsmith up`. Its pip waits for the index at the other end of `index`."""

    data_dir: Path
    gguf: Path
    process: subprocess.Popen[str]
    index: socket.socket

    def pip_has_ended(self) -> bool:
        with suppress(ConnectionResetError):
            while self.index.recv(4096):
                pass
        return True


@pytest.fixture
def first_start(tmp_path, monkeypatch) -> Iterator[FirstStart]:
    data_dir, gguf = tmp_path / "data", tmp_path / "share" / "model.gguf"
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_TIMEOUT", "3600")
        process = start("first_up", str(gguf), "--port", "0", "--data-dir", str(data_dir))
        try:
            server.settimeout(120)
            index, _ = server.accept()
            with index:
                index.settimeout(120)
                yield FirstStart(data_dir, gguf, process, index)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_bundled_model_is_fetched_ends_all_and_leaves_nothing(number, first_start):
    first_start.process.send_signal(number)
    _, said = first_start.process.communicate(timeout=120)
    assert (first_start.process.returncode, said.splitlines()[1:]) == (130, []), "it said only what it fetches"
    assert first_start.pip_has_ended()
    assert list(first_start.gguf.parent.iterdir()) == []
    DataFolder(first_start.data_dir).close()  # the lock is free


def test_pip_ends_with_a_stack_that_is_killed(first_start):
    first_start.process.kill()
    assert first_start.pip_has_ended()


def test_a_start_says_where_the_data_is_and_what_it_starts(tmp_path, model):
    where, starts, *_ = said_of_a_start(tmp_path / "data", model)
    assert where.startswith(f"data in {tmp_path / 'data'}, logs in ")
    assert starts == "starting valkey, broker, trainer-0"


def test_a_stack_that_is_ready_tells_of_a_run_that_starts(shared):
    with state_server(shared.data_dir) as client:
        records, session = RedisRecords(client), "8e7b807b-6464-4143-b786-c55fc61da05a"
        run = Model("project", session, "small", records.now(), "ready", {"rank": 8})
        records.put(Model.namespace, f"{session}:train:0", dump(run))
        client.zadd(keys.SESSIONS_HEARD, {session: 1})
        line = next(line for line in shared.process.stderr if line.startswith("run "))
    assert line == "run 8e7b807b:0 starts: LoRA 8 of small, project project\n"


def test_a_quiet_start_says_nothing(tmp_path, model):
    assert said_of_a_start(tmp_path / "data", model, "--quiet") == []


class ServedAtOnce:
    """A supervisor whose processes serve at once, until they are stopped at once."""

    ended = frozenset()

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, commands):
        list(commands)

    def run_until(self, condition):
        return True

    def note_ready(self, names):
        pass

    def run(self):
        pass


@pytest.mark.parametrize("quiet", [False, True])
def test_a_quiet_stack_looks_for_no_news(quiet, tmp_path, model, monkeypatch):
    followed = []
    monkeypatch.setattr(up, "Supervisor", ServedAtOnce)
    monkeypatch.setattr(up.RunNews, "follow", lambda _, until: followed.append(until))
    with start_valkey(tmp_path / "valkey") as url:
        given = {"data_dir": tmp_path / "data", "port": 0, "base_models": (("small", str(model)),), "redis": url}
        assert up.up(Options(**given, quiet=quiet)) == 0
    assert followed == [] if quiet else eventually(lambda: len(followed) == 1)


def test_a_worker_that_serves_is_known_to_have_been_ready(tmp_path, model, monkeypatch):
    """Its later deaths do not end a stack in which another worker still loads its model."""
    noted = set()

    class Starting(ServedAtOnce):
        def run_until(self, condition):
            condition()
            return True

        def note_ready(self, names):
            noted.update(names)

    nodes = (f"trainer-0@{socket.gethostname()}", "sampler-0@elsewhere")
    workers = dict.fromkeys(nodes, SimpleNamespace(role="trainer", base_model="another"))
    monkeypatch.setattr(up, "Supervisor", Starting)
    monkeypatch.setattr(up.BaseModels, "workers", lambda _: workers)
    with start_valkey(tmp_path / "valkey") as url:
        given = {"data_dir": tmp_path / "data", "port": 0, "base_models": (("small", str(model)),), "redis": url}
        assert up.up(Options(**given)) == 0
    assert noted == {"trainer-0"}


def test_a_server_that_answers_is_known_to_have_been_ready(tmp_path):
    """Its later deaths do not end a stack whose workers still load their models."""
    noted = []

    class Starting(ServedAtOnce):
        def note_ready(self, names):
            noted.append(names)

    servers = (Command("valkey", ()), Command("broker", ()))
    assert up._start_servers(Starting(), Plan(Settings(), tmp_path, servers))
    assert noted == [{"valkey", "broker"}]


def test_a_stack_goes_on_when_nobody_reads_its_output(tmp_path, model, monkeypatch):
    monkeypatch.setattr(up, "Supervisor", ServedAtOnce)
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as unread, start_valkey(tmp_path / "v") as url:
        monkeypatch.setattr(sys, "stdout", unread)
        monkeypatch.setattr(sys, "stderr", unread)
        given = {"data_dir": tmp_path / "data", "port": 0, "base_models": (("small", str(model)),), "redis": url}
        assert up.up(Options(**given)) == 0


def said_of_a_start(data_dir: Path, model: Path, *options: str) -> list[str]:
    with stack(data_dir, model, *options) as (process, _):
        process.send_signal(signal.SIGTERM)
        return process.communicate(timeout=120)[1].splitlines()


def test_each_worker_is_said_to_be_ready_once(capsys):
    starting, here = up._Starting({"trainer-0", "sampler-0"}, up.warn), socket.gethostname()
    for live in ([], ["trainer-0@elsewhere"], [f"trainer-0@{here}"], [f"trainer-0@{here}", f"sampler-0@{here}"]):
        starting.look(up._here(live), set())
    assert capsys.readouterr().err.splitlines() == ["trainer-0 is ready after 0 s", "sampler-0 is ready after 0 s"]


def test_workers_that_are_not_ready_are_named_each_minute(monkeypatch):
    said: list[str] = []
    passed = iter([0, 59, 61, 61, 119, 121])
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: next(passed)))
    starting = up._Starting({"trainer-0", "sampler-0", "of-another-base"}, said.append)
    for _ in range(5):
        starting.look(set(), {"of-another-base"})
    assert said == [f"after {after} s still waiting for sampler-0, trainer-0; see its log" for after in (61, 121)]


def test_state_is_there_again_after_a_stop_and_after_a_kill(tmp_path, model):
    for round_, ending in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
        with stack(tmp_path / "data", model) as (process, _):
            with state_server(tmp_path / "data") as client:
                assert client.incr("rounds") == round_ + 1
            process.send_signal(ending)
            process.wait(120)


def test_a_killed_workers_record_does_not_make_the_next_stack_look_ready(tmp_path, model):
    with stack(tmp_path / "data", model), state_server(tmp_path / "data") as client:
        info = BaseModelInfo("another", "Qwen3ForCausalLM", 320, 512, "float32", ())
        for host in (socket.gethostname(), "elsewhere"):
            worker = Worker("trainer", "another", asdict(info), {}, "", 0.0)
            RedisRecords(client).put(Worker.namespace, f"trainer-0@{host}", dump(worker), ttl_s=600)
    with stack(tmp_path / "data", model), state_server(tmp_path / "data") as client:
        assert [node for node, _ in RedisRecords(client).list(Worker.namespace)] == ["trainer-0@elsewhere"]


@pytest.mark.parametrize(
    ("setting", "runs", "told"), [("auto", "float32", 1), ("auto", "bfloat16", 0), ("float32", "float32", 0)]
)
def test_a_cpu_without_bf16_instructions_is_told_that_it_computes_in_fp32(setting, runs, told, tmp_path, capsys):
    settings = Settings(base_models=(BaseModelSettings(name="small", path="org/small", dtype=setting),))
    info = BaseModelInfo("small", "Qwen3ForCausalLM", 320, 512, runs, ())
    with start_valkey(tmp_path) as url, connect(url) as client:
        records = RedisRecords(client)
        worker = Worker("trainer", "small", asdict(info), {}, "", 0.0)
        records.put(Worker.namespace, "trainer-0@here", dump(worker), ttl_s=600)
        up._say_base_models(settings, BaseModels(settings, records), up.warn)
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("small: LoRA on")
    assert [line.startswith("small: in float32, because this CPU") for line in others] == [True] * told


def test_gpus_that_a_cpu_build_of_torch_does_not_use_are_one_line(tmp_path, model, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, 00000000:3B:00.0, NVIDIA H100 80GB HBM3, 81559, 4, GPU-1'\n")
    smi.chmod(0o755)
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    (tmp_path / "torch-2.13.0+cpu.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0+cpu\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with stack(tmp_path / "data", model, "--quiet") as (process, ready):
        assert ready.startswith("ready ")
        process.terminate()
        (line,) = process.stderr.read().splitlines()
    assert line.startswith("torch 2.13.0+cpu is a CPU build, so workers do not use this machine's GPUs; run ")


@pytest.mark.parametrize("bytes_left", [0, 16])
def test_a_full_disk_ends_the_start_with_2_and_one_line(bytes_left, tmp_path, model):
    """It stops the note of who holds the folder, or the next file. Without -B, it would also cut modules that Python
    compiles meanwhile, and each later import of one would fail."""
    limit = (
        "import resource, sys; from app import cli; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)"
    )
    command = [
        sys.executable,
        "-B",
        "-c",
        f"{limit}; sys.exit(cli.main(sys.argv[2:]))",
        str(bytes_left),
        "up",
        "--port",
        "0",
    ]
    options = ["--data-dir", tmp_path / "data", "--base-model", f"small={model}"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    said = f"tinsmith: cannot write to the data folder {tmp_path / 'data'}: File too large; choose another with"
    assert (ended.returncode, ended.stderr.startswith(said), ended.stderr.count("\n")) == (2, True, 1), ended.stderr


def test_a_start_on_an_empty_store_ends_with_2_and_one_line(tmp_path, model):
    with stack(tmp_path / "data", model):
        pass
    (tmp_path / "data" / "objects").rename(tmp_path / "unmounted")
    process = start(
        "up", "--quiet", "--port", "0", "--data-dir", str(tmp_path / "data"), "--base-model", f"small={model}"
    )
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    [line] = said.splitlines()
    assert line.startswith(
        f"tinsmith: the object store {tmp_path / 'data' / 'objects'} is not the one of the state server"
    )
    assert "mount its disk" in line


def test_a_second_stack_on_the_same_folder_exits_with_2_and_one_line(shared, model):
    second = start("up", "--port", "0", "--data-dir", str(shared.data_dir), "--base-model", f"small={model}")
    _, said = second.communicate(timeout=120)
    assert second.returncode == 2
    assert said == (
        f"tinsmith: another stack uses the data folder {shared.data_dir} (process {shared.process.pid}); stop it, "
        "or choose another folder with --data-dir\n"
    )


def test_the_table_starts_each_worker_once_under_a_name_of_its_own(tmp_path):
    toml = tomllib.loads(
        """
        [[base_models]]
        name = "a"
        path = "org/a"
        trainer.count = 2
        [[base_models]]
        name = "b"
        path = "org/b"
        full.count = 2
        full_sampler.count = 2
        """
    )
    commands = list(up.process_table(settings_module.parse(toml, "test"), tmp_path / "settings.toml"))
    workers = [(command.name, command.argv[command.argv.index("--base") + 1]) for command in commands[1:]]
    assert commands[0].name == "api"
    copies = [int(command.argv[command.argv.index("--copy") + 1]) for command in commands[1:]]
    assert copies == [0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert workers == [
        ("trainer-0", "a"),
        ("trainer-1", "a"),
        ("trainer-2", "b"),
        ("full-trainer-0", "b"),
        ("full-trainer-1", "b"),
        ("sampler-0", "a"),
        ("sampler-1", "b"),
        ("full-sampler-0", "b"),
        ("full-sampler-1", "b"),
    ]
    full = [command.name for command in commands if "--full" in command.argv]
    assert full == ["full-trainer-0", "full-trainer-1", "full-sampler-0", "full-sampler-1"]
    assert all(command.environ["TINSMITH_SETTINGS"] == os.fspath(tmp_path / "settings.toml") for command in commands)


def test_workers_that_name_no_gpu_get_one_each_of_those_that_are_there(tmp_path, model):
    given = Options(data_dir=tmp_path / "data", port=0, base_models=(("small", str(model)),), samplers=2)
    with closing(DataFolder(tmp_path / "data")) as folder:
        made = prepare(resolve(given, {}), given, folder, lambda: (4, 5, 7))
    [base] = settings_module.load(made.settings_file, {}).base_models
    assert (base.trainer.devices, base.sampler.devices) == (((4,),), ((5,), (7,)))


def test_the_bundled_models_workers_share_the_only_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(up.model, "ensure", lambda *_: None)
    given = Options(data_dir=tmp_path / "data", port=0)
    with closing(DataFolder(tmp_path / "data")) as folder:
        [base] = prepare(resolve(given, {}), given, folder, lambda: (3,)).settings.base_models
    assert (base.trainer.devices, base.sampler.devices) == (((3,),), ((3,),))
