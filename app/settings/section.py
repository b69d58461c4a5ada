"""The base class of every section of the settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Typed and frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
