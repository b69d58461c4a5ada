"""`tinsmith doctor` finds each mistake of a machine and its settings, and says how to mend it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from app import cli
from app.commands import doctor
from app.commands.doctor import OK, WARNING, WRONG, Finding
from app.domain.records import BaseModelInfo, Refusal, Worker
from app.settings import BaseModelSettings, SamplerSettings, Settings, TrainerSettings
from app.stack import checks
from app.stack.data_folder import DataFolder
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, dump
from tests.servers import free_port, start_valkey
from tests.servers_s3 import start_s3

BASE = "org/tiny"
# A GPU's folder of the NVIDIA driver, from an H100.
_INFORMATION = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 150\nBus Location: \t 0000:18:00.0\n"


class Said(NamedTuple):
    code: int
    lines: list[str]

    @property
    def text(self) -> str:
        """The output with each finding in one line."""
        return "\n".join(self.lines).replace("\n" + " " * 9, " ")


Doctor = Callable[..., Said]


@pytest.fixture
def tinsmith(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs `tinsmith doctor` with a config file of these lines, on a data folder that does not exist yet. The disk has
    much free space, which that of the tests may not have."""
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=2**40))

    def run(*arguments: str, config: str = "", port: int = 0) -> Said:
        file = tmp_path / "t.toml"
        file.write_text(f'data_dir = "{tmp_path}/data"\n[api]\nport = {port}\n{config}')
        code = cli.main(["doctor", "--config", str(file), *arguments])
        return Said(code, capsys.readouterr().out.splitlines())

    return run


def model_folder(folder: Path, shards: int = 1) -> Path:
    """A model's folder of so many weight files."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    names = ["model.safetensors"] if shards == 1 else [f"model-{index}.safetensors" for index in range(shards)]
    for index, name in enumerate(names):
        save_file({f"{index}.a": np.zeros((4, 4), np.float32), f"{index}.b": np.ones(3, np.int8)}, folder / name)
    if shards > 1:
        weights = {f"{index}.{name}": file for index, file in enumerate(names) for name in "ab"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def of_model(path: Path, more: str = "") -> str:
    return f'[[base_models]]\nname = "{BASE}"\npath = "{path}"\n{more}'


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Makes distributions look installed, before the real ones."""
    for name, version in versions.items():
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def driver_of(tmp_path: Path, count: int) -> Path:
    """An NVIDIA driver's folder with so many GPUs."""
    for number in range(count):
        (tmp_path / "nvidia" / "gpus" / f"0000:{number:02}:00.0").mkdir(parents=True)
        (tmp_path / "nvidia" / "gpus" / f"0000:{number:02}:00.0" / "information").write_text(_INFORMATION)
    return tmp_path / "nvidia" / "gpus"


def test_a_machine_with_nothing_wrong_is_exit_code_0_and_nothing_is_written(tinsmith: Doctor, tmp_path: Path) -> None:
    code, lines = said = tinsmith()
    assert code == 0 and lines[-1] == "nothing wrong, no warnings", lines
    assert {line.split()[0] for line in said.text.splitlines()[:-1]} == {OK}
    for check in ("versions: python 3", "GPUs", "data folder", "port", "state server", "object store", "bundled; made"):
        assert check in said.text
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        assert cli.main(["doctor", "--data-dir", folder, "--redis", "redis://127.0.0.1:1/0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert 60 < max(map(len, lines)) <= columns
    assert "\x1b" not in "".join(lines)
    assert all(line.startswith((OK, WARNING, WRONG, " " * 9)) for line in lines[:-1])


def test_json_is_one_document_with_every_finding(tinsmith: Doctor) -> None:
    code, lines = tinsmith("--json", "--redis", "redis://127.0.0.1:1/0")
    found = json.loads("\n".join(lines))
    states = [each["state"] for each in found["checks"]]
    assert (code, found["wrong"], found["warnings"]) == (1, 1, 0) == (1, states.count(WRONG), states.count(WARNING))
    wrong = next(each for each in found["checks"] if each["state"] == WRONG)
    assert wrong["check"] == "state server" and "start it, or correct its URL (--redis" in wrong["text"]


def test_settings_with_a_mistake_are_a_finding_beside_those_of_the_machine(tinsmith: Doctor) -> None:
    said = tinsmith(config="prot = 1\n")
    assert said.code == 1
    assert "wrong    settings: " in said.text and "did you mean 'port'?" in said.text
    assert "ok       versions: " in said.text and "ok       GPUs: " in said.text


def test_traces_without_their_packages_are_wrong(tinsmith: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = checks.installed_version
    monkeypatch.setattr(checks, "installed_version", lambda name: "" if "opentelemetry" in name else installed(name))
    said = tinsmith(config='[tracing]\nendpoint = "http://127.0.0.1:4318"\n')
    assert said.code == 1 and "wrong    versions: tracing.endpoint needs OpenTelemetry; run `pip" in said.text


def test_a_setting_without_an_effect_is_wrong_and_links_to_nowhere_are_a_warning(tinsmith: Doctor) -> None:
    said = tinsmith(config='host = "0.0.0.0"\n[limits.project]\ncapture_days = 7\n')
    assert said.code == 1 and "wrong    settings: limits.project.capture_days keeps answers only where" in said.text
    assert "warning  port: the API listens on every interface" in said.text


def test_a_durable_server_is_named_with_its_version_and_settings(
    tinsmith: Doctor, valkey: str, client: redis.Redis
) -> None:
    said = tinsmith("--redis", valkey)
    assert said.code == 0
    version = client.info()["valkey_version"]
    assert (
        f"ok       state server: Valkey {version} at {valkey}, appendonly yes, maxmemory 1.0 GiB, noeviction, "
        in said.text
    )
    assert "appendfsync always" in said.text and "ok       clock: 0." in said.text and "ok       broker: " in said.text


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--maxmemory-policy", "allkeys-lru"), "maxmemory-policy is allkeys-lru; set maxmemory-policy noeviction"),
        (("--appendfsync", "everysec"), "appendfsync is everysec; set appendfsync always"),
        (("--appendonly", "no"), "it keeps no append-only file; set appendonly yes"),
        (("--maxmemory", "0"), "set maxmemory"),
    ],
)
def test_a_server_that_may_lose_calls_is_wrong(
    options: tuple[str, str], remedy: str, tinsmith: Doctor, tmp_path: Path
) -> None:
    with start_valkey(tmp_path / "valkey", options=options) as url:
        said = tinsmith("--redis", url)
    assert said.code == 1 and "wrong    state server: " in said.text and remedy in said.text


def test_a_server_that_does_not_tell_appendfsync_is_a_warning(tinsmith: Doctor, tmp_path: Path) -> None:
    with start_valkey(tmp_path / "valkey", options=("--rename-command", "CONFIG", "")) as url:
        said = tinsmith("--redis", url)
    assert said.code == 0 and "warning  state server: " in said.text
    assert "make sure that its appendfsync is always" in said.text


@pytest.mark.parametrize(("ahead", "state"), [(0.0, OK), (1.5, OK), (-1.5, OK), (60.0, WARNING), (-60.0, WARNING)])
def test_a_clock_that_differs_from_the_servers_is_a_warning(ahead: float, state: str, client: redis.Redis) -> None:
    def now() -> float:
        seconds, microseconds = client.time()
        return seconds + microseconds / 1e6 + ahead

    found = doctor.clock(client, now)
    assert found.state == state
    assert (f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}" in found.text) or not ahead
    assert ("run NTP" in found.text) == (state == WARNING)


def test_a_port_that_is_given_twice_is_wrong(tinsmith: Doctor, tmp_path: Path) -> None:
    base = f'[[base_models]]\nname = "a"\npath = "{model_folder(tmp_path / "model")}"\n'
    said = tinsmith(config=f"{base}trainer.metrics_port = 9101\nsampler.metrics_port = 9101\n")
    assert said.code == 1
    assert "wrong    port: port 9101 is given twice, by trainer.metrics_port of 'a' and sampler." in said.text


def test_a_taken_port_is_wrong_and_that_of_the_running_stack_is_not(tinsmith: Doctor, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = tinsmith(port=port)
        assert said.code == 1 and f"wrong    port: cannot listen on 127.0.0.1:{port}" in said.text
        folder = DataFolder(tmp_path / "data")
        running = f"data_dir = '{folder.root}'\n[redis]\nurl = 'redis://127.0.0.1:1'\n[api]\nport = "
        (folder.run / "settings.toml").write_text(f"{running}{port}\n")
        assert f"ok       port: 127.0.0.1:{port}, used by the stack" in tinsmith(port=port).text
        (folder.run / "settings.toml").write_text(f"{running}1\n")
        assert f"wrong    port: cannot listen on 127.0.0.1:{port}" in tinsmith(port=port).text
        folder.close()
        assert f"wrong    port: cannot listen on 127.0.0.1:{port}" in tinsmith(port=port).text


def test_a_disk_that_is_full_is_wrong_and_one_nearly_full_a_warning(
    tinsmith: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tinsmith(config=f"[engine]\nfree_disk_bytes = {2**62}\n")
    assert said.code == 1 and "wrong    data folder: the disk of " in said.text and "delete something" in said.text
    assert "wrong    object store: the disk of " in said.text
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=2**30))
    said = tinsmith()
    assert said.code == 0 and "warning  data folder: " in said.text and "1.0 GiB free: little for" in said.text


def test_a_folder_that_cannot_be_written_is_wrong(tinsmith: Doctor) -> None:
    said = tinsmith("--data-dir", "/dev/null/data")
    assert said.code == 1 and "wrong    data folder: /dev/null/data cannot be written; correct /dev/null" in said.text


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_system_without_locks_is_wrong(
    exists: bool, tinsmith: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exists:
        DataFolder(tmp_path / "data").close()

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    said = tinsmith()
    assert (
        said.code == 1 and f"wrong    data folder: cannot lock the data folder {tmp_path}/data: Function" in said.text
    )


def test_an_s3_server_is_tried_and_one_that_is_away_is_wrong(tinsmith: Doctor, tmp_path: Path) -> None:
    with start_s3(tmp_path / "s3") as store:
        keys = f'[store]\naccess_key = "{store.access_key}"\nsecret_key = "{store.secret_key}"\n'
        said = tinsmith("--s3", store.url, config=keys)
        assert said.code == 0 and f"{store.url} honours conditional writes" in said.text
        said = tinsmith("--s3", store.url, config=keys.replace(store.secret_key, "other"))
        assert said.code == 1 and "check store.access_key, store.secret_key and store.url" in said.text
    said = tinsmith("--s3", f"http://127.0.0.1:{free_port()}/bucket")
    assert said.code == 1 and "does not answer" in said.text and "start it or fix store.url" in said.text


@pytest.mark.parametrize("shards", [1, 3])
def test_the_weights_of_a_model_are_whole_to_the_last_byte(shards: int, tinsmith: Doctor, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", shards)
    assert f"ok       model {BASE}: {folder}, with whole weights" in tinsmith(config=of_model(folder)).text
    last = max(folder.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    said = tinsmith(config=of_model(folder))
    assert said.code == 1 and f"wrong    model {BASE}: {last.name} is not a valid safetensors file" in said.text
    assert f"download the model again into {folder}" in said.text
    last.unlink()
    said = tinsmith(config=of_model(folder))
    assert said.code == 1 and f"there is no {last}; download the model again" in said.text


@pytest.mark.parametrize(
    ("name", "text", "mistake"),
    [
        ("config.json", "{}", "names no architectures; add them"),
        ("config.json", "{", "is not a JSON object; download"),
        ("model.safetensors.index.json", "{}", "names no files; download"),
        ("model.safetensors", "", "is not a valid safetensors file"),
    ],
)
def test_a_damaged_file_of_a_model_is_wrong(
    name: str, text: str, mistake: str, tinsmith: Doctor, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / name).write_text(text)
    said = tinsmith(config=of_model(folder))
    assert said.code == 1 and mistake in said.text


def test_every_mistake_of_a_model_is_a_finding(tinsmith: Doctor) -> None:
    trainer = '[base_models.trainer]\nbackend = "torch"\nranks = 2\nhostfile = "/no/hosts"\n'
    more = f'dtype = "nf4"\n{trainer}[base_models.full]\n'
    said = tinsmith(config=of_model(Path("/no/such"), more))
    wrong = [line for line in said.text.splitlines() if line.startswith(f"wrong    model {BASE}: ")]
    parts = ("no folder '/no/such'", "one process", "'nf4'", "'/no/hosts' cannot be read")
    assert [part in " ".join(wrong) for part in parts] == [True] * 4
    assert len(wrong) == 4 and said.code == 1


def test_a_model_of_the_hub_is_left_to_the_stack(tinsmith: Doctor) -> None:
    said = tinsmith(config=of_model(Path("org/name")))
    assert said.code == 0 and f"ok       model {BASE}: org/name on the Hugging Face hub" in said.text


def test_a_model_of_the_hub_that_cannot_be_downloaded_is_a_warning_unless_it_is_here(
    tinsmith: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/dev/null/hub")
    said = tinsmith(config=of_model(Path("org/name")))
    assert said.code == 0 and f"warning  model {BASE}: org/name cannot be downloaded into the Hugging" in said.text
    assert "HF_HOME" not in tinsmith(config=of_model(Path("/no/such"))).text
    monkeypatch.setattr("app.commands.model_files.weight_bytes", lambda _: 1)
    assert "HF_HOME" not in tinsmith(config=of_model(Path("org/name"))).text


def test_gpus_beside_a_cpu_build_of_torch_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, torch="2.13.0+cpu")
    found = list(doctor.gpus(Settings(), {}, driver_of(tmp_path, 2)))
    assert [finding.state for finding in found] == [WARNING]
    assert found[0].text.startswith(
        "0: NVIDIA H100 80GB HBM3, 1: NVIDIA H100 80GB HBM3; torch 2.13.0+cpu is a CPU build"
    )
    assert "run `pip install torch===2.13.0`" in found[0].text


def test_gpus_beside_a_cuda_build_are_listed_and_vllm_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, torch="2.13.0")
    monkeypatch.setattr(checks, "installed_version", lambda name: "2.13.0" if name == "torch" else "")
    base = BaseModelSettings(name=BASE, path="x")
    driver = driver_of(tmp_path, 2)
    found = list(doctor.gpus(Settings(base_models=(base,)), {"CUDA_VISIBLE_DEVICES": "0,1"}, driver, str))
    assert [finding.state for finding in found] == [OK, WARNING]
    assert "1: NVIDIA H100 80GB HBM3; CUDA_VISIBLE_DEVICES is '0,1'" in found[0].text
    assert "vLLM is not installed" in found[1].text


def test_gpus_that_torch_cannot_use_are_wrong_unless_none_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, torch="2.13.0")
    driver = driver_of(tmp_path, 1)
    (wrong,) = doctor.gpus(Settings(), {}, driver, lambda: "the driver is too old")
    assert wrong == ("GPUs", WRONG, "0: NVIDIA H100 80GB HBM3; the driver is too old")
    for none in ("", "-1"):
        (fine,) = doctor.gpus(Settings(), {"CUDA_VISIBLE_DEVICES": none}, driver, lambda: "the driver is too old")
        assert fine.state == OK


@pytest.mark.parametrize(
    ("does", "within_s", "said"),
    [
        ("raise SetupError('torch cannot use them: too old')", 120, "torch cannot use them: too old"),
        ("os.abort()", 120, "torch ended with code -6 when it looked for them; see that nvidia-smi answers"),
        ("time.sleep(60)", 5, "torch did not find them within 5 s; see that nvidia-smi answers"),
    ],
    ids=["refuses", "dies", "hangs"],
)
def test_the_fault_of_torch_is_that_of_a_worker(
    tmp_path: Path, does: str, within_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._torch_fault() == ""
    monkeypatch.setattr(doctor, "_TORCH_S", within_s)
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys, time, types\nfrom app.errors import SetupError\n\ndef check_gpus():\n    {does}\n\n"
        "sys.modules['workers.backends.devices'] = types.SimpleNamespace(check_gpus=check_gpus)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert doctor._torch_fault() == said


def test_gpus_that_other_programs_use_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.hardware, "used_bytes", lambda: {3: 30 * 2**30})
    (found,) = doctor._used_gpus(None)
    assert found.state == WARNING and found.text.startswith("30.0 GiB of GPU 3 are in use by other programs")
    assert list(doctor._used_gpus(Settings())) == [], "the stack itself may use it"


def test_workers_without_room_on_the_gpus_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, torch="2.13.0")
    trainer, sampler = TrainerSettings(memory_share=0.6), SamplerSettings(backend="transformers", memory_share=0.6)
    base = BaseModelSettings(name=BASE, path="x", trainer=trainer, sampler=sampler)
    found = list(doctor.gpus(Settings(base_models=(base,)), {}, driver_of(tmp_path, 1), str))
    assert [finding.state for finding in found] == [WRONG]
    assert "to share a GPU, lower memory_share" in found[0].text
    by_name = {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    (wrong,) = doctor.gpus(Settings(base_models=(base,)), by_name, tmp_path / "nvidia" / "gpus", str)
    assert wrong.state == WRONG
    assert wrong.text.startswith("CUDA_VISIBLE_DEVICES is 'GPU-1', and GPU-1 is not the UUID of one GPU")


def test_a_sampler_that_sleeps_beside_no_trainer_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, torch="2.13.0")
    trainer, sampler = TrainerSettings(count=0), SamplerSettings(backend="vllm", sleep=True)
    base = BaseModelSettings(name=BASE, path="x", trainer=trainer, sampler=sampler)
    found = next(iter(doctor.gpus(Settings(base_models=(base,)), {}, driver_of(tmp_path, 1), str)))
    assert found.state == WRONG
    assert "does not go with trainer.count = 0" in found.text


def test_a_running_stack_tells_what_adapters_cover_and_who_refuses_a_model(
    tinsmith: Doctor, client: redis.Redis, valkey: str, tmp_path: Path
) -> None:
    info = BaseModelInfo(BASE, "LlamaForCausalLM", 300, 64, "float32", ("attn", "mlp"))
    records = RedisRecords(client)
    worker = Worker("trainer", BASE, asdict(info), {"never_adapted": {"norm": "a vector"}}, "", 0.0)
    records.put(Worker.namespace, "trainer-0", dump(worker))
    records.put(Refusal.namespace, Refusal.id("sampler", BASE), dump(Refusal("sampler", BASE, "no such layer")))
    folder = DataFolder(tmp_path / "data")
    running = f'data_dir = "{folder.root}"\n[redis]\nurl = "{valkey}"\n{of_model(Path("org/name"))}'
    (folder.run / "settings.toml").write_text(running)
    said = tinsmith()
    folder.close()
    assert f"ok       model {BASE}: LoRA on attn, mlp; never on norm" in said.text
    assert f"wrong    model {BASE}: no sampler can serve it: no such layer" in said.text
    assert f" at {valkey}, appendonly yes" in said.text and "a stack runs on it" in said.text
    assert "LoRA on" not in tinsmith().text


def test_findings_do_not_show_a_password(tinsmith: Doctor, tmp_path: Path) -> None:
    with start_valkey(tmp_path / "valkey") as url, connect(url) as client:
        client.config_set("requirepass", "hunter2")
        said = tinsmith("--redis", url.replace("//", "//:hunter2@"))
        assert said.code == 0 and "hunter2" not in said.text
        wrong = tinsmith("--redis", url.replace("//", "//:hunter3@"))
        assert wrong.code == 1 and "hunter3" not in wrong.text


def test_text_of_others_cannot_steer_the_terminal() -> None:
    assert doctor._lines(Finding("model \x1b[2J", OK, "a")) == ["ok       model \\x1b[2J: a"]


def test_shared_memory_that_is_too_small_for_full_fine_tunes_is_a_warning(tinsmith: Doctor, tmp_path: Path) -> None:
    sections = "[base_models.full]\n[base_models.full_sampler]\n[engine]\nhandover_bytes = 1\n"
    said = tinsmith(config=of_model(model_folder(tmp_path / "model"), sections))
    assert f"{WARNING} " in said.text
    assert "engine.handover_bytes is 0.0 GiB" in said.text
