"""Which files of a model's folder are its tokenizer."""

from __future__ import annotations

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
"""transformers chooses a tokenizer's class by it."""

TEMPLATE_FOLDER = "additional_chat_templates"
"""Further chat templates, one <name>.jinja each."""
