"""What is accounted for: how much of each kind, by the hour."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TRAINED = "training"
"""Tokens of forwards and forward_backwards."""
PREFILLED = "sampling_prefill"
"""Tokens of prompts that were computed."""
CACHED = "sampling_prefill_cached"
"""Tokens of prompts that an engine still had."""
SAMPLED = "sampling_sample"
"""Tokens drawn."""
SAVED = "checkpoint"
"""Checkpoints saved under a path."""
STORED = "storage"
"""Byte-seconds of checkpoints."""

HOUR_S = 3600

Usage = Mapping[str, int]
"""Amounts by kind."""
NOTHING: Usage = MappingProxyType({})
