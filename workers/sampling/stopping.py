"""When a sequence ends: at an end token, at a stop string, or at its limit."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_UNFINISHED = "\ufffd"
# A character has at most so many bytes, and hardly a token less than one.
_CHARACTER = 4


class StopText:
    """Finds stop strings in generated text, token by token. Text of the prompt never counts."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        # Primed with the prompt, since many tokenizers drop the space of a text's first word. Special tokens are kept:
        # a stop string may be one.
        self._stream = DecodeStream(ids=seen(tokenizer, prompt), skip_special_tokens=False)
        self._stops = stops
        self._tail = ""
        self._keep = max(map(len, stops)) - 1

    def completes(self, token: int) -> bool:
        """Whether `token` completes a stop string."""
        self._tail += self._stream.step(self._tokenizer, token) or ""
        if any(stop in self._tail for stop in self._stops):
            return True
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return False


def seen(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """What of the prompt a DecodeStream is to begin behind: all of it, or nothing where it ends in half a character.

    The stream would wait for that character's end and then give the whole prompt's text along with it.
    """
    end = tokenizer.decode(list(prompt[-_CHARACTER:]), skip_special_tokens=False)
    return [] if end.endswith(_UNFINISHED) else list(prompt)
