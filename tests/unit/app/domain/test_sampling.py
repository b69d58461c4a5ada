"""The text of tokens that come one by one."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from app.domain.sampling import TokenText
from tests.tokenizers import letter_tokenizer

CORE = letter_tokenizer()
Z, BAD, SPACE, A, B = ord("z"), 0x9D, 256, 257, 258
SMILE = list("😀".encode())


def texts(tokens: list[int], context: tuple[int, ...] = ()) -> list[str]:
    """The texts of the tokens, each when it is certain, and the rest."""
    text = TokenText(CORE, context, skip_special_tokens=True)
    return [*(text.add(token) for token in tokens), text.rest()]


def test_bytes_that_are_no_utf8_behind_ones_that_are_lose_and_double_no_text():
    assert CORE.decode([Z, BAD, A]) == "\ufffd\ufffda", "it takes back the z"
    assert texts([Z, BAD, A, B]) == ["z", "", "\ufffda", "b", ""]
    assert texts([B, *SMILE, BAD, BAD, A]) == ["b", "", "", "", "😀", "", "", "\ufffd\ufffda", ""]
    assert texts([BAD, A], context=(Z,)) == ["", "\ufffda", ""]


def test_the_space_behind_such_bytes_stays():
    assert texts([Z, BAD, SPACE, B]) == ["z", "", "\ufffd ", "b", ""]


def test_such_bytes_at_the_end_are_the_rest():
    assert texts([Z, BAD]) == ["z", "", "\ufffd"]


def test_every_letter_of_random_tokens_is_there_once():
    chance = random.Random(0)
    for _ in range(2000):
        tokens = [chance.choice([chance.randrange(256), SPACE, A, B]) for _ in range(8)]
        text = "".join(texts([A, *tokens]))
        for letter, token in ((" ", SPACE), ("b", B)):
            least = tokens.count(token)
            assert least <= text.count(letter) <= least + tokens.count(ord(letter))


def test_another_error_of_the_tokenizer_is_raised():
    class Broken:
        def step(self, tokenizer: Tokenizer, token: int) -> str:
            raise Exception("another")

    text = TokenText(CORE, (), skip_special_tokens=True)
    text._stream = Broken()
    with pytest.raises(Exception, match="another"):
        text.add(A)
