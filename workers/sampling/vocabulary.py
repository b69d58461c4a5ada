"""How tokens end sequences in a base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from app.errors import SetupError
from app.settings import BaseModelSettings


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, which stop strings need, and the model's end tokens."""

    tokenizer: Tokenizer
    end_tokens: frozenset[int]


def load(settings: BaseModelSettings) -> Vocabulary:
    """The model's tokenizer, with every end token that it or the model's generation config names.

    Raises SetupError for a tokenizer without a fast implementation.
    """
    source = settings.tokenizer or settings.path
    tokenizer = AutoTokenizer.from_pretrained(local_path(source))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SetupError(f"the tokenizer at {source!r} has no fast form; add its tokenizer.json")
    named = _generation_config(local_path(settings.path)).eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return Vocabulary(tokenizer.backend_tokenizer, frozenset(token for token in ends if token is not None))


def local_path(path: str) -> str:
    """A folder's path with ~ resolved; a hub id as it is."""
    return str(Path(path).expanduser())


def _generation_config(path: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # older models have none, and name the end token in the model's own config
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
