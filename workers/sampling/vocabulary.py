"""How tokens end sequences in a base model."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.base_model import read_config
from workers.loading import explained, local_path


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, which stop strings need, and the model's end tokens."""

    tokenizer: Tokenizer
    end_tokens: frozenset[int]


def load(settings: BaseModelSettings) -> Vocabulary:
    """The model's tokenizer, with every end token that it or the model's generation config names.

    Raises SetupError for one that cannot be loaded, or without a fast implementation.
    """
    with explained(settings, tokenizer=True):
        source = settings.tokenizer or settings.path
        tokenizer = AutoTokenizer.from_pretrained(local_path(source), trust_remote_code=False)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise SetupError(f"the tokenizer at {source!r} has no fast form; add its tokenizer.json")
    with explained(settings):
        named = _generation_config(settings).eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return Vocabulary(tokenizer.backend_tokenizer, frozenset(token for token in ends if token is not None))


def _generation_config(settings: BaseModelSettings) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(local_path(settings.path))
    except OSError:  # older models have none, and name the end token in the model's own config
        return GenerationConfig.from_model_config(read_config(settings))
