"""A checkpoint's manifest: written last and create-only, so a checkpoint is there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from app.domain.ops import LoraSpec

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`path` is its tinker:// address (empty for a snapshot or an ephemeral sampler adapter); `generation` tells an
    overwritten checkpoint from its successor. seq and epoch are the model's when it was written."""

    path: str
    generation: str
    model_id: str
    owner: str
    base_model: str
    lora: LoraSpec
    seq: int
    epoch: int
    created: str
    files: Mapping[str, FileEntry]
    threads: int
    cpu: str
    has_optimizer: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Raises ValueError on another schema version."""
        raw = json.loads(data)
        if raw.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"manifest schema {raw.get('schema_version')!r} is not {SCHEMA_VERSION}")
        raw["lora"] = LoraSpec(**raw["lora"])
        raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
        return cls(**raw)
