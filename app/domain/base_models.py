"""What a trainer or sampler says of the base model it has loaded; the API checks requests against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """`dtype` is the name of the base's torch dtype; `trainable_groups` of attn, mlp, unembed have linears here."""

    name: str
    arch: str
    vocab_size: int
    max_context: int
    dtype: str
    trainable_groups: tuple[str, ...]
