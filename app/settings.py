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
# Shown when the backend "auto" selects transformers on a machine with a GPU.
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
    sequence_parallel: int = Field(1, ge=1, description="ranks that share a micro-batch's tokens; divides `ranks`")
    hostfile: str = Field(
        "",
        description="DeepSpeed hostfile (lines 'host slots=n') of the ranks, rank 0 on the first; empty: this machine",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    offload: bool = Field(
        False,
        description="keep in CPU memory: ZeRO-3's base; in full fine-tuning weights, gradients and optimizer state too",
    )
    devices: tuple[NonNegativeInt, ...] = Field(
        (), description="GPU indices, one for each rank; empty means the CPU, or GPU 0.."
    )
    micro_batch_tokens: int = Field(1024, ge=1, description="tokens in one forward/backward pass: bounds its memory")
    exact: bool | Literal["auto"] = Field(
        "auto", description="run each Op in its own pass, so that its bits depend on no other Op; auto: true on a CPU"
    )
    merged_tokens: int = Field(
        8192, ge=1, description="unless exact: tokens that Ops of other models may add to a pass"
    )
    merge_wait_s: float = Field(
        0.01,
        ge=0,
        description="wait of a shared pass for recently active models, or a fifth of the last pass if longer; 0: none",
    )
    activation_checkpointing: bool | Literal["auto"] = Field(
        "auto", description="run layers again in the backward pass: less memory, a third more time; auto: where needed"
    )
    rank_deadline_s: float = Field(
        600.0, gt=0, description="a rank group restarts after a pass without progress for this long"
    )
    device_models: int = Field(
        0, ge=0, description="models kept in GPU memory; the others stay in host memory until their next Op; 0: all"
    )
    max_models: int = Field(
        64, ge=1, description="models that one trainer holds; the least recently used ones are evicted"
    )
    memory_share: float = Field(1.0, gt=0, le=1, description="share of its GPU's memory that one rank may use")
    metrics_port: int = Field(0, description="Prometheus port of the first worker; 0 takes any free one")


class SamplerSettings(_Section):
    backend: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="auto: vllm on a GPU where it is installed, else transformers"
    )
    count: int = Field(1, ge=1, description="sampler workers on this machine")
    devices: tuple[NonNegativeInt, ...] = Field((), description="GPU indices for one worker")
    tensor_parallel: int = Field(1, ge=1, description="vLLM tensor parallel size")
    memory_share: float = Field(0.85, gt=0, le=1, description="share of GPU memory (of 4 GiB on a CPU) vLLM may take")
    max_loras: int = Field(8, ge=1, description="adapters that run at the same time; the others wait for their turns")
    max_batch: int = Field(64, ge=1, description="sequences decoded together")
    queue_requests: int = Field(
        20_000, ge=1, description="most unfinished sampling requests of this base; further ones get 429"
    )
    queue_tokens: int = Field(
        50_000_000,
        ge=1,
        description="most tokens of these requests, prompt + num_samples * max_tokens each; further ones get 429",
    )
    concurrency: int = Field(256, ge=1, description="requests that one worker holds at the same time")
    step_deadline_s: float = Field(
        600.0, gt=0, description="a sampler restarts when its engine runs requests but samples no token for this long"
    )
    cache_bytes: int = Field(8 * 2**30, ge=0, description="adapter files kept on disk that are not in use")
    engine_args: dict[str, Any] = Field({}, description="further vLLM engine arguments, passed on unchanged")
    metrics_port: int = Field(0, description="Prometheus port of the first worker; 0 takes any free one")


class BaseModelSettings(_Section):
    name: str = Field(description="the name clients ask for, such as Qwen/Qwen3-0.6B")
    path: str = Field(description="a local folder, or a Hugging Face hub id")
    tokenizer: str = Field("", description="path or hub id that clients load their tokenizer from; empty means `path`")
    max_context: int = Field(0, ge=0, description="longest sequence in tokens; 0 means the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "nf4", "int8", "fp8"] = Field(
        "auto", description="auto: bfloat16 where it is fast, else float32; nf4, int8, fp8: 4 or 8 bits a frozen weight"
    )
    max_rank: int = Field(128, ge=1, description="highest LoRA rank; vLLM reserves memory for adapters of this rank")
    router_replay: bool = Field(False, description="samplers keep each token's experts; trainers take the same ones")
    trainer: TrainerSettings = TrainerSettings()
    full: TrainerSettings | None = Field(
        None, description="trainers for full fine-tuning, each with one model; none by default"
    )
    sampler: SamplerSettings = SamplerSettings()
    full_sampler: SamplerSettings | None = Field(
        None,
        description="samplers of fully fine-tuned models, each with one model's weights at a time; none by default",
    )

    @property
    def quantized(self) -> bool:
        """True when the linears of the base model have 4 or 8 bits."""
        return self.dtype in ("nf4", "int8", "fp8")

    def check_quantized(self) -> None:
        """Raises SetupError when another setting does not go with a quantised base model."""
        split = self.trainer.backend == "deepspeed" and self.trainer.zero_stage == 3
        others = {"trainer.zero_stage = 3": split, "section full": self.full, "section full_sampler": self.full_sampler}
        if self.quantized and (wrong := [name for name, is_set in others.items() if is_set]):
            raise SetupError(
                f"base model {self.name!r}: dtype {self.dtype!r} is for frozen weights that each rank holds whole, and "
                f"does not go with {wrong[0]}; change that, or set dtype to auto"
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
    public_url: str = Field(
        "", description="URL of this server for clients, used in signed URLs; empty means http://host:port"
    )
    poll_capacity: int = Field(
        1000,
        ge=1,
        description="polls that are held for poll_hold_s; with more polls, each is held for less time",
    )
    poll_hold_s: float = Field(
        30.0, gt=0, description="longest time a poll is held; the SDK gives up on a poll after 45 s"
    )
    batch_polls: bool = Field(
        False, description="the SDK waits for all samples of a client in one poll, instead of one connection for each"
    )
    pjwt_auth_enabled: bool = Field(
        False, description="the SDK exchanges its key for a token and sends the token instead; needs url_secret"
    )
    token_lifetime_s: float = Field(
        3600.0, ge=300, description="time for which such a token is valid; the SDK renews it"
    )
    spare_threads: int = Field(200, ge=8, description="threads for all other calls, in addition to poll_capacity")
    max_body_bytes: int = Field(
        64 * 2**20, ge=1, description="largest body with a batch or a prompt, also when unpacked"
    )
    compress_batches: bool = Field(
        False, description="the SDK compresses batches with zstd: less to transfer, more to compute"
    )
    tokenizers: Literal["auto", "served", "local"] = Field(
        "auto",
        description="served: clients load tokenizers from this server, by the Hub's routes and HF_ENDPOINT, under the "
        "model's name; local: clients get the folder and load from it; auto: as served, but clients get the folder "
        "while only this machine reaches the API",
    )


class LimitSettings(_Section):
    small_body_bytes: int = Field(
        2 * 2**20,
        ge=2**16,
        description="largest body without a batch or a prompt; max_body_bytes applies if it is lower",
    )
    json_values: int = Field(
        2**20,
        ge=1000,
        description="most values in a JSON body, and four times the parts of a batch in protobuf; a batch of an SDK "
        "that sends JSON can have half as many parts",
    )
    json_depth: int = Field(64, ge=16, le=256, description="deepest nesting of lists and objects in a JSON body")
    datums: int = Field(8192, ge=1, description="most datums in one call; the SDK sends 1,024 at a time")
    batch_tokens: int = Field(2**22, ge=1, description="most tokens in all datums of one call")
    project: Limits = Field(Limits(), description="limits of each project that has none of its own")


class StoreSettings(_Section):
    url: str = Field(
        "", description="file:///folder, or http(s)://host:port/bucket of an S3 server; empty: data_dir/objects"
    )
    public_url: str = Field("", description="URL of the store for clients, used in signed S3 URLs; empty means url")
    access_key: str = Field("", repr=False)
    secret_key: str = Field("", repr=False)
    region: str = "us-east-1"


class RedisSettings(_Section):
    url: str = Field(
        "",
        repr=False,
        description="state server: journal and futures; empty starts an embedded Valkey in data_dir",
    )
    broker_url: str = Field(
        "",
        repr=False,
        description="server for Celery messages and streamed tokens; empty means database 1 of the state server",
    )


class EngineSettings(_Section):
    lease_s: float = Field(
        15.0, gt=0, description="an owner that does not renew its leases for this long loses its models"
    )
    gap_s: float = Field(
        330.0, gt=0, description="a missing seq is given up after this time; the SDK itself retries for 300 s"
    )
    healthy_s: float = Field(
        30.0,
        gt=0,
        description="a worker that handles none of its tasks for this long is not ready; after twice this time it ends",
    )
    idle_s: float = Field(600.0, gt=0, description="a trainer unloads a model that is not used for this long")
    ring_again_s: float = Field(10.0, gt=0, description="the sweeper dispatches an Op again that has waited this long")
    snapshot_share: float = Field(0.02, gt=0, le=1, description="largest share of a trainer's time spent on snapshots")
    journal_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="a model gets a snapshot after this many bytes in its journal, whatever snapshot_share says",
    )
    handover_dir: str = Field(
        "",
        description="folder of new weights for samplers on the same machine; empty: in shared memory",
    )
    handover_bytes: int = Field(
        2 * 2**30,
        ge=0,
        description="most bytes in that folder; weights that do not fit are uploaded before they can be sampled",
    )
    payload_budget_bytes: int = Field(
        512 * 2**20, ge=1, description="most bytes of calls kept in Redis to run or replay; further calls get 503"
    )
    memory_share: float = Field(
        0.8, gt=0, le=1, description="above this share of the state server's maxmemory, new calls get 503"
    )
    spill_bytes: int = Field(
        8 * 2**20,
        ge=4096,
        description="larger calls move to the object store; smaller ones only when half the budget is used",
    )
    session_s: float = Field(600.0, gt=0, description="a session without heartbeat or call for this long expires")
    retain_s: float = Field(
        7 * 86_400.0,
        gt=0,
        description="a run's journal, snapshots and samplers are kept for this long after its session",
    )
    orphan_s: float = Field(86_400.0, gt=0, description="stored files without a reference are deleted after this time")
    result_unread_s: int = Field(86_400, ge=1, description="time for which an unread result is kept")
    result_read_s: int = Field(3_600, ge=1, description="time for which a small result is kept after its first read")


class Settings(_Section):
    data_dir: Path = Path("tinsmith-data")
    api_keys: tuple[str, ...] = Field((), repr=False, description="sha256 hex digests of valid API keys")
    url_secret: str = Field(
        "", repr=False, description="secret that signs download URLs of the folder store, and tokens"
    )
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
