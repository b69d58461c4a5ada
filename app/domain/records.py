"""The typed small records that Redis keeps beside the journals, and the facts that workers report of a base model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from app.domain.checkpoints import ENCRYPTED, OWNER, PROJECT, CheckpointPrefix, Manifest

READS_IMAGES = "reads_images"
"""The part of a worker's description that says so. It is not in its `info`, because API processes of earlier versions
know every field there."""
FOLLOWS_SCHEMAS = "follows_schemas"
"""The part of a sampler's description that says that its answers can follow a JSON schema."""
LATER_FACTS = (READS_IMAGES, FOLLOWS_SCHEMAS)
"""Facts of a BaseModelInfo that are in a worker's description instead of its `info`, where they are true."""
READS_GRADIENTS = "reads_gradients"
"""The part of a trainer's description that says that it restores snapshots with pending gradients. Trainers of earlier
versions say nothing."""
LAST_WORKERS = "last_workers"
"""The namespace of the last worker of each role and base model that started. These records stay: an API process that
starts while no worker runs has the facts of the base model from them."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spm.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files of an image processor. A client counts an image's tokens with it."""
CONFIG_FILE = "config.json"
"""transformers reads the tokenizer's class from it."""
WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""A model's weights are in the first file, or in the files that the second one names."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of further chat templates, one file <name>.jinja for each."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session. `status` is open, expired (no heartbeat for a long time), or the reason its client gave when it
    finished the session, which may have explained it in `detail`. `user` opened it; empty for a session that several
    users share."""

    namespace: ClassVar[str] = "sessions"
    owner: str
    created: float
    status: str = "open"
    display_name: str = ""
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    user: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A training run. `state` is creating, ready or failed; `lora` holds LoraSpec's fields, and is empty for full
    fine-tuning (`full`)."""

    namespace: ClassVar[str] = "models"
    owner: str
    session_id: str
    base_model: str
    created: float
    state: str = "creating"
    lora: dict[str, Any] = field(default_factory=dict)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    full: bool = False
    critic: bool = False
    inflight: str = ""
    """The prefix of the newest weights that were saved for in-flight sampling."""
    copied_from: str = ""
    """The path of the checkpoint that this run is a copy of. Such a run holds nothing else."""
    key: str = ""
    """The id of the API key that created the model; empty if it is unknown."""
    user: str = ""
    """The user who created the model; empty if it is unknown."""

    @property
    def kind(self) -> str:
        """For people: critic, full, or LoRA with its rank."""
        return "critic" if self.critic else "full" if self.full else f"LoRA {self.lora.get('rank', '-')}"


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session. `prefix` is the location of its adapter in the object store, or with `full` of all its
    weights; empty for the base model itself.

    `follows` is the model whose newest in-flight weights its requests use; empty where `prefix` never changes.
    """

    namespace: ClassVar[str] = "samplers"
    owner: str
    session_id: str
    base_model: str
    created: float
    model_path: str = ""
    prefix: str = ""
    follows: str = ""
    full: bool = False


@dataclass(frozen=True, slots=True)
class ShmTransfer:
    """A shared-memory transfer: an adapter, named by its object-store prefix, that samplers may use before it is in the
    object store.

    The record is made at the commit that first refers to the adapter (the model's Op at `seq`) and deleted when the
    upload has ended. Until then that Op and all later ones stay in the journal, so that the adapter can be rebuilt.
    """

    namespace: ClassVar[str] = "handovers"
    model_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, named by its tinker:// path. `prefix` is its folder in the object store, generation
    included."""

    namespace: ClassVar[str] = "checkpoints"
    owner: str
    model_id: str
    kind: str
    base_model: str
    prefix: str
    created: float
    size_bytes: int
    lora: dict[str, Any]
    files: list[str]
    expires_at: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    critic: bool = False
    public: bool = False
    """Everybody with an API key may read the checkpoint."""
    key: str = ""
    """The id of the API key that created the checkpoint or its run; empty if it is unknown."""
    expiry_by: str = ""
    """OWNER or PROJECT if that one chose `expires_at`; else empty, as in Expiry."""

    @classmethod
    def of(cls, place: CheckpointPrefix, manifest: Manifest, key: str = "") -> Checkpoint:
        """The record of a checkpoint that is complete at `place`."""
        return cls(
            owner=manifest.owner,
            model_id=place.model_id,
            kind=place.kind,
            base_model=manifest.base_model,
            prefix=str(place),
            created=manifest.created_at,
            size_bytes=manifest.size,
            lora=asdict(manifest.lora) if manifest.lora else {},
            files=sorted(manifest.files),
            expires_at=manifest.expires_at,
            user_metadata=dict(manifest.user_metadata),
            critic=manifest.critic,
            public=manifest.public,
            key=key,
            expiry_by=manifest.expiry_by,
        )

    @property
    def full(self) -> bool:
        """True when the checkpoint holds all of a model's weights, not an adapter."""
        return not self.lora

    @property
    def merged(self) -> bool:
        """True when it holds a merged model for other programs; the adapter cannot be read from it."""
        return not self.full and "config.json" in self.files

    @property
    def encrypted(self) -> bool:
        """True when its files are encrypted for a key that this server never saw."""
        return any(name.endswith(ENCRYPTED) for name in self.files)

    @property
    def counts(self) -> bool:
        """True when it counts for its project's keep_checkpoints: it is not published, and its owner chose no TTL."""
        return not self.public and self.expiry_by != OWNER and (self.expires_at is None or self.expiry_by == PROJECT)

    def is_expired(self, now: float) -> bool:
        """True when the checkpoint has expired at `now`, read from the state server's clock."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload of an adapter's files. `lora` holds the LoraSpec's fields that its files must have, and `most_bytes` is
    the greatest size of all of them. Its files lie below `uploaded`."""

    namespace: ClassVar[str] = "uploads"
    owner: str
    base_model: str
    lora: dict[str, Any]
    created: float
    most_bytes: int
    expires_at: float
    finished: bool = False

    def is_expired(self, now: float) -> bool:
        """True when the upload has expired at `now`, read from the state server's clock."""
        return self.expires_at <= now


UPLOADS = "uploads"


def uploaded(upload_id: str, name: str) -> str:
    """The object-store key of an uploaded file."""
    return f"{UPLOADS}/{upload_id}/{name}"


@dataclass(frozen=True, slots=True)
class Loss:
    """A custom loss. `content` is the CustomLoss encoded by app/domain/ops.py, in base64."""

    namespace: ClassVar[str] = "losses"
    owner: str
    session_id: str
    created: float
    content: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker, by node name. The record expires when the heartbeat stops. `info` holds BaseModelInfo's fields.

    A worker that is not `healthy` runs, but does not do its work. `queue` is the queue it shares with its peers. A
    sampler decodes `batch` sequences at once, and holds up to `holds` requests, each for one sequence or more.
    `pace_s`: the average seconds between the ends of the last calls while there was work; 0 while it has run none.
    """

    namespace: ClassVar[str] = "workers"
    role: str
    base_model: str
    info: dict[str, Any]
    describe: dict[str, Any]
    metrics_url: str
    started: float
    healthy: bool = True
    queue: str = ""
    batch: int = 0
    holds: int = 0
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why workers of a role exit at their start: they cannot serve the base model.

    It is deleted when a worker of this role has started.
    """

    namespace: ClassVar[str] = "refusals"
    role: str
    base_model: str
    reason: str

    @staticmethod
    def id(role: str, base_model: str) -> str:
        return f"{role}/{base_model}"


@dataclass(frozen=True, slots=True)
class Demand:
    """A worker of a role that is needed although no call of its queue waits. The record is deleted when
    such a worker has started, and expires soon after the last need."""

    namespace: ClassVar[str] = "demands"
    role: str
    base_model: str


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The facts of a base model. `dtype` is the name of its torch dtype, or of its quantised weights (nf4, int8, fp8).
    `trainable_groups` are the groups (attn, mlp, unembed) that have linear layers in it. `reads_images`: it takes
    images among the tokens. `follows_schemas`: its samples can follow a JSON schema."""

    name: str
    arch: str
    vocab_size: int
    max_context: int
    dtype: str
    trainable_groups: tuple[str, ...]
    reads_images: bool = False
    follows_schemas: bool = False
