"""How what is stored looks to clients."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from app import ids
from app.domain.records import Checkpoint

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def checkpoint_view(path: str, found: Checkpoint) -> dict[str, Any]:
    """The SDK's Checkpoint."""
    fields: Mapping[str, Any] = {
        "checkpoint_id": ids.TinkerPath.parse(path).checkpoint_id,
        "checkpoint_type": _TYPES[found.kind],
        "time": timestamp(found.created),
        "tinker_path": path,
        "size_bytes": found.size_bytes,
        "public": found.public,
        "user_metadata": found.user_metadata or None,
        "expires_at": None if found.expires_at is None else timestamp(found.expires_at),
    }
    return {key: value for key, value in fields.items() if value is not None}


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The SDK reads nothing but texts where it let its user write anything."""
    return {key: str(value) for key, value in metadata.items()}


def timestamp(unix: float) -> str:
    """ISO 8601 with its zone, to the microsecond."""
    return datetime.fromtimestamp(unix, UTC).isoformat()


def user_urn(user: str) -> str:
    """A user as the SDK names him."""
    return f"tml:user:{user}"
