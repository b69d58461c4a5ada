"""A base model's tokenizer and end tokens, and the search for stop strings in sampled text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from app.domain.sampling import TokenText
from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.models.base_model import read_config
from workers.models.loading.source import explained, local_path

_UNFINISHED = "\ufffd"
# A character has at most this many bytes, and a token has hardly ever less than one byte.
_CHARACTER = 4


class StopText:
    """Finds stop strings in generated text, token by token. Text of the prompt never counts."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: tuple[str, ...]) -> None:
        # Primed with the prompt, since many tokenizers drop the space of a text's first word. Special tokens are kept:
        # a stop string may be one.
        self._stream = TokenText(tokenizer, seen(tokenizer, prompt), skip_special_tokens=False)
        self._stops = stops
        self._tail = ""
        self._keep = max(map(len, stops)) - 1

    def completes(self, token: int) -> bool:
        """Returns whether `token` completes a stop string."""
        self._tail += self._stream.add(token)
        if any(stop in self._tail for stop in self._stops):
            return True
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return False


def seen(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Returns the part of the prompt that primes a TokenText: all, or nothing if it ends in half a character.

    With half a character, the stream would wait for its end and then return the prompt's full text along with it.
    """
    end = tokenizer.decode(list(prompt[-_CHARACTER:]), skip_special_tokens=False)
    return [] if end.endswith(_UNFINISHED) else list(prompt)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, which stop strings need, and the model's end tokens."""

    tokenizer: Tokenizer
    end_tokens: frozenset[int]


def load_vocabulary(settings: BaseModelSettings) -> Vocabulary:
    """Loads the model's tokenizer, and every end token that the tokenizer or the model's generation config names.

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
    except OSError:  # older models have no generation config, and name the end token in the model's own config
        return GenerationConfig.from_model_config(read_config(settings))
