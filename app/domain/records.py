"""The small records Redis keeps beside the journals, typed. `dump` and `load` turn them into flat string fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from app.domain.accounts import Account, Key, Organisation, Project, User

ENCRYPTED = ".age"
"""What the name of a file that was encrypted ends with."""


@dataclass(frozen=True, slots=True)
class Session:
    """`status` is open, expired (nobody heard of it for long), or the reason its client finished it with. `user` opened
    it; empty for one that nobody did, as those that several use."""

    namespace: ClassVar[str] = "sessions"
    owner: str
    created: float
    status: str = "open"
    display_name: str = ""
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    user: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A training run. `state` is creating, ready or failed; `lora` holds LoraSpec's fields once it is ready, and
    nothing where all weights are trained (`full`)."""

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
    """The path it holds a copy of, and nothing else."""
    key: str = ""
    """The id of the API key that made it, where that is known."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session. `prefix` is where its adapter lies in the object store, or with `full` all of its weights;
    empty for the base itself.

    `follows` is the model whose newest in-flight weights its requests are to have; empty where `prefix` stays for ever.
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
class Handover:
    """An adapter, by its object-store prefix, that samplers may use though it is not in the object store yet.

    It is made at the commit that first refers to the adapter, the model's Op at `seq`, and goes when the upload has
    ended. Until then that Op and what follows stay in the journal, so that the adapter can be made again.
    """

    namespace: ClassVar[str] = "handovers"
    model_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint by its tinker:// path. `prefix` is its folder in the object store, generation included."""

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
    """Everybody with a key may read it."""
    key: str = ""
    """The id of the API key that made it, or the run it is of, where that is known."""

    @property
    def full(self) -> bool:
        """It holds all of a model's weights, not an adapter."""
        return not self.lora

    @property
    def merged(self) -> bool:
        """It holds a model for other programs, of which no adapter can be read any more."""
        return not self.full and "config.json" in self.files

    @property
    def encrypted(self) -> bool:
        """Its files are for whoever holds a key that this server never saw."""
        return any(name.endswith(ENCRYPTED) for name in self.files)

    def is_expired(self, now: float) -> bool:
        """`now` by the state server's clock."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Loss:
    """A custom loss. `content` is the CustomLoss as app/domain/codec.py encodes it, in base64."""

    namespace: ClassVar[str] = "losses"
    owner: str
    session_id: str
    created: float
    content: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker, by node name; the record lapses when it stops beating. `info` holds BaseModelInfo's fields.

    One that is not `healthy` runs, but does not do what it is asked. `queue` is the one it reads with its peers. A
    sampler decodes `batch` sequences at once, and holds requests for `holds` at least. `pace_s`: seconds from the end
    of one call to that of the next while there was something to do, on average of the last; 0 while it ran none.
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


R = TypeVar("R", Session, Model, Sampler, Handover, Checkpoint, Loss, Worker, Organisation, Project, User, Key)


def dump(record: Session | Model | Sampler | Handover | Checkpoint | Loss | Worker | Account) -> dict[str, str]:
    """Each field as JSON text."""
    return {f.name: json.dumps(getattr(record, f.name)) for f in fields(record)}


def load(cls: type[R], stored: Mapping[str, str]) -> R:
    """The inverse of `dump`; fields it does not know (a model's journal state) are left alone."""
    return cls(**{f.name: json.loads(stored[f.name]) for f in fields(cls) if f.name in stored})
