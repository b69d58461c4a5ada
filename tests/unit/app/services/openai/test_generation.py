"""Streamed text: complete characters, no part of a stop string, and the same for every split of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.services.openai.generation import TextStream
from app.services.openai.tokenizer import BaseTokenizer, read
from tests.tokenizers import END, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BaseTokenizer:
    return read(str(byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def ids(tokenizer: BaseTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).tolist()


def pieces(stream: TextStream, tokens: list[int], stopped: bool = False) -> list[str]:
    return [*(stream.push([token], [0.0]).text for token in tokens), stream.finish(stopped).text]


def test_a_character_is_passed_on_whole(tokenizer: BaseTokenizer):
    text = "né 😀!"
    given = pieces(TextStream(tokenizer, [], []), ids(tokenizer, text))
    assert "".join(given) == text
    assert all("\ufffd" not in piece for piece in given)
    assert sum(bool(piece) for piece in given) == len(text)


def test_what_is_left_of_half_a_character_is_passed_on_at_the_end(tokenizer: BaseTokenizer):
    tokens = ids(tokenizer, "a😀")[:-1]
    given = pieces(TextStream(tokenizer, [], []), tokens)
    assert given[:-1] == ["a", "", "", ""]
    assert "".join(given) == tokenizer.decode(tokens)


def test_a_prompt_that_ends_in_half_a_character_is_no_part_of_the_text(tokenizer: BaseTokenizer):
    prompt = ids(tokenizer, "before 😀")[:-2]
    assert "".join(pieces(TextStream(tokenizer, prompt, []), ids(tokenizer, "after"))) == "after"


def test_a_stop_string_is_cut_and_no_part_of_it_shown_before(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], ["<end>"])
    assert pieces(stream, ids(tokenizer, "a<enough<end>"), stopped=True) == [
        *["a", "", "", "", "<eno", "u", "g", "h"],
        *["", "", "", "", "", ""],
    ]
    assert stream.stopped


def test_a_stop_string_of_a_special_token_and_text_is_cut(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], [f"b{END}cd"])
    tokens = ids(tokenizer, f"ab{END}cbb{END}cd")
    assert pieces(stream, tokens, stopped=True) == ["a", "", "", "", "bc", "b", "", "", "", ""]
    assert stream.stopped


def test_letters_with_a_special_token_between_them_are_no_stop_string_as_in_the_sampler(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], ["bc"])
    assert "".join(pieces(stream, ids(tokenizer, f"ab{END}cd"))) == "abcd"
    assert not stream.stopped


def test_the_begin_of_a_stop_string_that_never_comes_is_given_at_the_end(tokenizer: BaseTokenizer):
    assert "".join(pieces(TextStream(tokenizer, [], ["<end>"]), ids(tokenizer, "a<en"))) == "a<en"


def test_tokens_are_reported_with_their_text_and_the_one_that_ended_it_is_not(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], [])
    tokens = [*ids(tokenizer, "ab"), 257]
    reported = [token for at in tokens for token in stream.push([at], [-float(at)]).tokens]
    reported += stream.finish(stopped=True).tokens
    assert [(token.position, token.id, token.logprob, token.start) for token in reported] == [
        (0, tokens[0], -float(tokens[0]), 0),
        (1, tokens[1], -float(tokens[1]), 1),
    ]


def test_tokens_of_a_stop_string_are_not_reported(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], ["cd"])
    tokens = ids(tokenizer, "abcd")
    reported = [*stream.push(tokens, [0.0] * 4).tokens, *stream.finish(stopped=True).tokens]
    assert [token.id for token in reported] == tokens[:2]


def test_special_tokens_are_no_text(tokenizer: BaseTokenizer):
    assert "".join(pieces(TextStream(tokenizer, [], []), ids(tokenizer, f"a{END}b{END}"))) == "ab"


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 257), max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    stops=st.lists(st.text("abAB é", min_size=1, max_size=3), max_size=3),
    prompt=st.lists(st.integers(0, 257), max_size=12),
)
def test_however_tokens_are_cut_the_text_is_that_of_all_of_them_up_to_the_first_stop(
    tokenizer: BaseTokenizer, tokens: list[int], cuts: list[int], stops: list[str], prompt: list[int]
):
    if stops:  # they are also found in the text of special tokens, which is not shown: the tests above
        tokens = [token for token in tokens if token < 256]
    stream = TextStream(tokenizer, prompt, stops)
    text, reported, begin = "", [], 0
    for cut in cuts:
        piece = stream.push(tokens[begin : begin + cut], [0.0] * len(tokens[begin : begin + cut]))
        text, reported, begin = text + piece.text, [*reported, *piece.tokens], begin + cut
    last = stream.finish(stopped=False)
    whole = tokenizer.decode(tokens)
    ends = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert text + last.text == whole[: min(ends, default=len(whole))]
    positions = [token.position for token in [*reported, *last.tokens]]
    assert positions == list(range(len(positions)))
    assert ends or len(positions) == len(tokens)


def test_a_tokenizers_own_words_keep_their_spaces(tokenizer: BaseTokenizer):
    prompt = np.array(ids(tokenizer, "one"))
    assert "".join(pieces(TextStream(tokenizer, prompt.tolist(), []), ids(tokenizer, " two"))) == " two"
