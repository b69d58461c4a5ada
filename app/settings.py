"""Every setting, typed and frozen. One TOML file holds the settings; an unknown key is an error.

Secrets may come from the environment instead of the file, so that compose and Kubernetes can mount them:
TINSMITH_REDIS_URL, TINSMITH_BROKER_URL, TINSMITH_S3_ACCESS_KEY, TINSMITH_S3_SECRET_KEY, TINSMITH_API_KEY.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from app.domain.limits import Limits
from app.errors import SetupError
from app.settings_errors import describe

SETTINGS_VARIABLE = "TINSMITH_SETTINGS"
# Said where the backend "auto" chooses transformers beside a GPU.
NO_VLLM = (
    "vLLM is not installed, so the slower transformers sampler is used beside this machine's GPU; for vLLM run "
    '`pip install "tinsmith[vllm]"`, or `make setup GPU=1` in a checkout'
)
_SHARED_MEMORY = Path("/dev/shm")
_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1"})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainerSettings(_Section):
    backend: Literal["deepspeed", "torch"] = Field("deepspeed", description="torch is the one-process reference")
    count: int = Field(1, ge=1, description="trainer workers (rank groups) on this machine")
    ranks: int = Field(1, ge=1, description="processes in one rank group; more than 1 needs deepspeed")
    hostfile: str = Field(
        "", description="a DeepSpeed hostfile ('host slots=n' a line): where the ranks run, 0 on the first; empty: here"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    offload: bool = Field(False, description="keep in CPU memory: ZeRO-3's base; when fine-tuned in full, all else")
    devices: tuple[NonNegativeInt, ...] = Field(
        (), description="GPU indices, one for each rank; empty means the CPU, or GPU 0.."
    )
    micro_batch_tokens: int = Field(1024, ge=1, description="tokens in one forward/backward pass: bounds its memory")
    exact: bool | Literal["auto"] = Field(
        "auto", description="every Op in a pass of its own, so that its bits depend on nothing else; auto: on a CPU"
    )
    merged_tokens: int = Field(8192, ge=1, description="unless exact, what other models' Ops may add to a pass")
    merge_wait_s: float = Field(
        0.01,
        ge=0,
        description="a shared pass waits so long, or a fifth of the last, for models served lately",
    )
    activation_checkpointing: bool = Field(
        False, description="compute layers again in the backward pass: far less memory, a third more time"
    )
    rank_deadline_s: float = Field(600.0, gt=0, description="a group whose pass stands still this long starts anew")
    device_models: int = Field(
        0, ge=0, description="models that stay in GPU memory, the others in the host's until their next Op; 0: all"
    )
    max_models: int = Field(64, ge=1, description="models one trainer holds; the least recently used make room")
    memory_share: float = Field(1.0, gt=0, le=1, description="share of its GPU's memory one rank may take")
    metrics_port: int = Field(0, description="Prometheus port of the first worker; 0 takes any free one")


class SamplerSettings(_Section):
    backend: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="auto: vllm on a GPU where it is installed, else transformers"
    )
    count: int = Field(1, ge=1, description="sampler workers on this machine")
    devices: tuple[NonNegativeInt, ...] = Field((), description="GPU indices for one worker")
    tensor_parallel: int = Field(1, ge=1, description="vLLM tensor parallel size")
    memory_share: float = Field(0.85, gt=0, le=1, description="share of GPU memory (of 4 GiB on a CPU) vLLM may take")
    max_loras: int = Field(8, ge=1, description="adapters that run at a time; the others wait for their turns")
    max_batch: int = Field(64, ge=1, description="sequences decoded together")
    queue_requests: int = Field(
        20_000, ge=1, description="unfinished sampling requests of this base; beyond it new ones are put off (429)"
    )
    queue_tokens: int = Field(
        50_000_000, ge=1, description="tokens those may take, prompt + num_samples * max_tokens each (429)"
    )
    concurrency: int = Field(256, ge=1, description="requests one worker holds at once")
    step_deadline_s: float = Field(
        600.0, gt=0, description="a sampler that draws nothing of what its engine runs for this long starts anew"
    )
    cache_bytes: int = Field(8 * 2**30, ge=0, description="adapter files kept on disk that are not in use")
    engine_args: dict[str, Any] = Field({}, description="further vLLM engine arguments, passed as they are")
    metrics_port: int = Field(0, description="Prometheus port of the first worker; 0 takes any free one")


class BaseModelSettings(_Section):
    name: str = Field(description="the name clients ask for, such as Qwen/Qwen3-0.6B")
    path: str = Field(description="a local folder, or a Hugging Face hub id")
    tokenizer: str = Field("", description="what clients load their tokenizer from; empty means `path`")
    max_context: int = Field(0, ge=0, description="longest sequence in tokens; 0 means the model's own")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the chip is fast at it"
    )
    max_rank: int = Field(64, ge=1, description="greatest LoRA rank a client may ask for")
    trainer: TrainerSettings = TrainerSettings()
    full: TrainerSettings | None = Field(
        None, description="trainers for full fine-tuning, one model to each; none unless given"
    )
    sampler: SamplerSettings = SamplerSettings()
    full_sampler: SamplerSettings | None = Field(
        None, description="samplers of models fine-tuned in full, one's weights at a time; none unless given"
    )

    def for_full(self) -> BaseModelSettings:
        """The base model's settings for its trainers for full fine-tuning. Raises SetupError when it has no such
        trainers."""
        if self.full is None:
            raise SetupError(f"base model {self.name!r} has no section [base_models.full] in the settings")
        return self.model_copy(update={"trainer": self.full.model_copy(update={"max_models": 1})})

    def for_full_sampler(self) -> BaseModelSettings:
        """The base model's settings for its samplers of fully fine-tuned models. Raises SetupError when it has no such
        samplers."""
        if self.full_sampler is None:
            raise SetupError(f"base model {self.name!r} has no section [base_models.full_sampler] in the settings")
        return self.model_copy(update={"sampler": self.full_sampler})


class ApiSettings(_Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    public_url: str = Field("", description="how clients reach us, for signed URLs; empty means http://host:port")
    poll_capacity: int = Field(1000, ge=1, description="polls held for poll_hold_s; beyond it holds get shorter")
    poll_hold_s: float = Field(30.0, gt=0, description="the SDK gives up on a poll after 45 s")
    batch_polls: bool = Field(
        False, description="the SDK waits for all samples of a client in one poll, not in one connection each"
    )
    pjwt_auth_enabled: bool = Field(
        False, description="the SDK changes its key into a token that it sends in the key's place; needs url_secret"
    )
    token_lifetime_s: float = Field(3600.0, ge=300, description="how long such a token is good; the SDK renews it")
    spare_threads: int = Field(200, ge=8, description="threads beside poll_capacity, kept for everything else")
    max_body_bytes: int = Field(
        64 * 2**20, ge=1, description="a body with a batch or a prompt in it, also when unpacked"
    )
    compress_batches: bool = Field(
        False, description="the SDK sends batches zstd-compressed: less to transfer, more to compute"
    )
    tokenizers: Literal["auto", "served", "local"] = Field(
        "auto",
        description="served: on the Hub's routes, where clients look a local folder's up by the model's name, with "
        "HF_ENDPOINT; local: not served, clients get the folder; auto: served, but while only this machine reaches the "
        "API clients get the folder",
    )


class LimitSettings(_Section):
    small_body_bytes: int = Field(
        2 * 2**20, ge=2**16, description="a body without a batch or a prompt, where max_body_bytes is not lower"
    )
    json_values: int = Field(
        2**20,
        ge=1000,
        description="values in a JSON body, and four times the parts of a batch in protobuf; a batch of an SDK that "
        "sends JSON has half as many",
    )
    json_depth: int = Field(64, ge=16, le=256, description="lists and objects in one another in a JSON body")
    datums: int = Field(8192, ge=1, description="datums in one call; the SDK sends 1,024 at a time")
    batch_tokens: int = Field(2**22, ge=1, description="tokens in one call's datums together")
    project: Limits = Field(Limits(), description="what every project may take that has no other limits of its own")


class StoreSettings(_Section):
    url: str = Field(
        "", description="file:///folder, or http(s)://host:port/bucket of an S3 server; empty: data_dir/objects"
    )
    public_url: str = Field("", description="url as clients reach it, for signed S3 URLs; empty means url")
    access_key: str = Field("", repr=False)
    secret_key: str = Field("", repr=False)
    region: str = "us-east-1"


class RedisSettings(_Section):
    url: str = Field(
        "", repr=False, description="state: journal and futures; empty starts an embedded Valkey in data_dir"
    )
    broker_url: str = Field(
        "",
        repr=False,
        description="Celery messages and tokens on their way; empty means database 1 of the state server",
    )


class EngineSettings(_Section):
    lease_s: float = Field(15.0, gt=0, description="a silent owner loses its models after this")
    gap_s: float = Field(
        330.0, gt=0, description="a missing seq is given up after this; the SDK itself retries for 300 s"
    )
    healthy_s: float = Field(
        30.0, gt=0, description="a worker that does nothing asked of it for this long is not ready; after twice it ends"
    )
    idle_s: float = Field(600.0, gt=0, description="a trainer lets go of a model that is unused for this long")
    ring_again_s: float = Field(10.0, gt=0, description="the sweeper rings for Ops that waited this long unstarted")
    snapshot_share: float = Field(0.02, gt=0, le=1, description="greatest share of a trainer's time spent on snapshots")
    journal_bytes: int = Field(
        256 * 2**20, ge=0, description="a model whose journal grew by more is snapshotted whatever snapshot_share says"
    )
    handover_dir: str = Field(
        "", description="where trainers leave new weights for samplers of the same machine; empty: in shared memory"
    )
    handover_bytes: int = Field(
        2 * 2**30, ge=0, description="most it may hold; what finds no room is uploaded before it can be sampled"
    )
    payload_budget_bytes: int = Field(
        512 * 2**20, ge=1, description="calls kept in Redis to run or replay; beyond it new ones are put off (503)"
    )
    memory_share: float = Field(
        0.8, gt=0, le=1, description="share of the state server's maxmemory beyond which new work is put off (503)"
    )
    spill_bytes: int = Field(
        8 * 2**20, ge=4096, description="a larger call moves to the object store; others once half the budget is used"
    )
    session_s: float = Field(600.0, gt=0, description="a session without heartbeat or call for this long has expired")
    retain_s: float = Field(
        7 * 86_400.0, gt=0, description="a run's journal, snapshots and samplers are kept this long after its session"
    )
    orphan_s: float = Field(86_400.0, gt=0, description="stored files nobody refers to are removed after this")
    result_unread_s: int = Field(86_400, ge=1, description="how long an unread result is kept")
    result_read_s: int = Field(3_600, ge=1, description="how long a small result is kept after its first read")


class Settings(_Section):
    data_dir: Path = Path("tinsmith-data")
    api_keys: tuple[str, ...] = Field((), repr=False, description="sha256 hex digests of the keys that may call")
    url_secret: str = Field("", repr=False, description="signs download URLs of the folder store, and tokens")
    api: ApiSettings = ApiSettings()
    redis: RedisSettings = RedisSettings()
    store: StoreSettings = StoreSettings()
    engine: EngineSettings = EngineSettings()
    limits: LimitSettings = LimitSettings()
    base_models: tuple[BaseModelSettings, ...] = ()

    def base_model(self, name: str) -> BaseModelSettings | None:
        return next((b for b in self.base_models if b.name == name), None)

    @property
    def concurrent_samples(self) -> int:
        """The number of samples that a client should have under way when it polls for each of them."""
        sections = [section for base in self.base_models for section in (base.sampler, base.full_sampler)]
        return min([self.api.poll_capacity, *(section.queue_requests for section in sections if section is not None)])

    @property
    def handover_dir(self) -> Path:
        """The folder for shared-memory transfer: `engine.handover_dir`, or by default a separate folder for each data
        folder."""
        if self.engine.handover_dir:
            return Path(self.engine.handover_dir)
        if not os.access(_SHARED_MEMORY, os.W_OK):
            return self.data_dir / "handover"
        return _SHARED_MEMORY / f"tinsmith-{hashlib.sha256(bytes(self.data_dir.absolute())).hexdigest()[:16]}"

    @property
    def names_folders(self) -> bool:
        """True when clients load a local tokenizer from its folder, and not by the model's name."""
        if self.api.tokenizers != "auto":
            return self.api.tokenizers == "local"
        return {self.api.host, urlsplit(self.api.public_url).hostname or self.api.host} <= _THIS_MACHINE

    @property
    def public_url(self) -> str:
        return self.api.public_url or f"http://{self.api.host}:{self.api.port}"

    @property
    def broker_url(self) -> str:
        return self.redis.broker_url or _other_database(self.redis.url)


def hash_key(api_key: str) -> str:
    """The sha256 digest of a key. Keys hold 256 random bits, so a plain sha256 is enough for storage."""
    return hashlib.sha256(api_key.encode()).hexdigest()


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Settings:
    """Loads settings from a TOML file; secrets from the environment override it. Raises SetupError naming the
    mistake."""
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise SetupError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SetupError(f"the config file {path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path} is not valid TOML: {error}") from None
    return parse(_with_secrets(raw, environ), str(path))


def defaults(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of an empty file, with the secrets from the environment."""
    return parse(_with_secrets({}, environ), "the environment")


def parse(raw: Mapping[str, Any], source: str) -> Settings:
    """Builds settings from plain values. Raises SetupError naming every bad key: one in a single line, several on a
    line each below the first."""
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        mistakes = describe(error, Settings)
    if len(mistakes) == 1:
        raise SetupError(f"{source}: {mistakes[0]}")
    raise SetupError("\n  ".join([f"{source} has {len(mistakes)} mistakes:", *mistakes]))


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Loads the settings that every started process reads, from the file that TINSMITH_SETTINGS names."""
    path = environ.get(SETTINGS_VARIABLE)
    if not path:
        raise SetupError(f"set {SETTINGS_VARIABLE} to the path of a config file (see README.md)")
    return load(Path(path), environ)


def _with_secrets(raw: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    for variable, section, key in (
        ("TINSMITH_REDIS_URL", "redis", "url"),
        ("TINSMITH_BROKER_URL", "redis", "broker_url"),
        ("TINSMITH_S3_ACCESS_KEY", "store", "access_key"),
        ("TINSMITH_S3_SECRET_KEY", "store", "secret_key"),
    ):
        values = raw.setdefault(section, {}) if variable in environ else None
        if isinstance(values, dict):  # a value that is not a section is refused later
            values[key] = environ[variable]
    keys = raw.get("api_keys", [])
    if "TINSMITH_API_KEY" in environ and isinstance(keys, list):
        raw["api_keys"] = [*keys, hash_key(environ["TINSMITH_API_KEY"])]
    return raw


def _other_database(url: str) -> str:
    base, _, database = url.rpartition("/")
    return f"{base}/{int(database) + 1}" if database.isdigit() else f"{url.rstrip('/')}/1"
