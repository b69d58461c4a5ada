"""A checkpoint's manifest. It is written last and create-only, so a checkpoint exists completely or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime

from app.domain.ops import LoraSpec

SCHEMA_VERSION = 1
# That of a snapshot between a forward_backward and its optim_step. An earlier version would forget the gradients.
WINDOW_VERSION = 2
MANIFEST = "manifest.json"
UNHASHED = "unhashed.json"
"""The manifest of a checkpoint in shared memory, whose files have no sha256: the upload computes them."""
WINDOW = "window.json"
"""The file of a snapshot with its gradient accumulation window, unless that is empty."""
ENCRYPTED = ".age"
"""Suffix of the names of encrypted files."""
MODELS = "models"
SNAPSHOT = "snapshots"
# 15 digits: Tinsmith writes no larger number, and the state server's scripts count exactly only up to 2^53.
_PREFIX = re.compile(
    rf"{MODELS}/(?P<model>[^/]+)/(?P<kind>[^/]+)/(?P<name>[^/]+)/(?P<seq>[0-9]{{1,15}})-(?P<epoch>[0-9]{{1,15}})(?:/[^/]+)?$"
)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointPrefix:
    """The location of the files of one checkpoint or snapshot. A higher epoch was written later, and in one epoch a
    higher seq."""

    model_id: str
    kind: str
    name: str
    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{MODELS}/{self.model_id}/{self.kind}/{self.name}/{self.generation}"

    @property
    def generation(self) -> str:
        """Differs for every attempt that may write other bytes. It holds the lease's epoch, so a replaced owner can
        never touch its successor's files."""
        return f"{self.seq}-{self.epoch}"

    @classmethod
    def of(cls, key: str) -> CheckpointPrefix:
        """Parses a prefix or key that is known to be one."""
        place = cls.parse(key)
        assert place is not None, f"{key} is not a checkpoint prefix"
        return place

    @classmethod
    def parse(cls, key: str) -> CheckpointPrefix | None:
        """Parses a prefix or the key of a file directly below it; returns None for anything else."""
        match = _PREFIX.match(key)
        if match is None:
            return None
        return cls(match["model"], match["kind"], match["name"], int(match["epoch"]), int(match["seq"]))


OWNER, PROJECT = "owner", "project"


@dataclass(frozen=True, slots=True)
class Expiry:
    """The end of a checkpoint: `at` (unix s), or None to keep it for ever. `by` is OWNER if the owner chose it
    later, PROJECT if it is the project's checkpoint_ttl_s, or empty; an `at` was then given with the save."""

    at: float | None = None
    by: str = ""

    @classmethod
    def of(cls, now: float, ttl_s: int | None, project_ttl_s: int | None) -> Expiry:
        """The expiry of a checkpoint that is made `now` with its own TTL, if it has one, or else its project's."""
        if ttl_s is not None:
            return cls(now + ttl_s)
        return cls() if project_ttl_s is None else cls(now + project_ttl_s, PROJECT)


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint or snapshot.

    `path` is its tinker:// address (empty for a snapshot or an ephemeral sampler adapter). `generation` distinguishes
    an overwritten checkpoint from its successor. `seq` and `epoch` are those of the model at the time of writing.
    `lora` is None when it holds all of a model's weights. `expires_at` and `expiry_by` (as in Expiry) and `public` are
    the values at the save; a later change is stored beside the manifest (see app/stores/objects/notes.py).
    """

    path: str
    generation: str
    model_id: str
    owner: str
    base_model: str
    lora: LoraSpec | None
    seq: int
    epoch: int
    created: str
    files: Mapping[str, FileEntry]
    threads: int
    cpu: str
    has_optimizer: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: float | None = None
    critic: bool = False
    public: bool = False
    schema_version: int = SCHEMA_VERSION
    expiry_by: str = ""

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def created_at(self) -> float:
        """`created` in unix seconds."""
        return datetime.fromisoformat(self.created).timestamp()

    def to_json(self) -> bytes:
        fields = asdict(self)
        if not self.expiry_by:
            del fields["expiry_by"]  # earlier versions do not know it
        return json.dumps(fields, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Raises ValueError for what is no manifest, or has another schema version."""
        try:
            raw = json.loads(data)
            if raw.get("schema_version") not in (SCHEMA_VERSION, WINDOW_VERSION):
                raise ValueError(f"manifest schema {raw.get('schema_version')!r} is not {SCHEMA_VERSION}")
            raw["lora"] = raw["lora"] and LoraSpec(**raw["lora"])
            raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
            return cls(**raw)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error
