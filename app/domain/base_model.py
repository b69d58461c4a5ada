"""A base model: the facts that a trainer or sampler reports about it, and the files of its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

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
CONFIG_FILE = "config.json"
"""transformers reads the tokenizer's class from it."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of further chat templates, one file <name>.jinja for each."""


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The facts of a base model. `dtype` is the name of its torch dtype. `trainable_groups` are the groups (attn, mlp,
    unembed) that have linear layers in it."""

    name: str
    arch: str
    vocab_size: int
    max_context: int
    dtype: str
    trainable_groups: tuple[str, ...]
