"""Streamed text: complete characters, no part of a stop string, and the same for every split of the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from app.services.openai.generation import TextStream
from app.services.openai.tokenizer import BaseTokenizer, read
from tests.tokenizers import BEGIN, END, byte_tokenizer, letter_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BaseTokenizer:
    return read(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


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


@pytest.mark.parametrize(("stops", "shown"), [([], "z\ufffd abc"), (["b"], "z\ufffd a")])
def test_a_text_goes_on_behind_bytes_that_take_back_what_was_shown(stops: list[str], shown: str):
    core = letter_tokenizer()
    tokens = [ord("z"), 0x9D, *(core.token_to_id(letter) for letter in "▁abc")]
    given = pieces(TextStream(BaseTokenizer(core, {}, {}), [], stops), tokens)
    assert "".join(given) == shown
    whole = TextStream(BaseTokenizer(core, {}, {}), [], stops)
    assert whole.push(tokens, [0.0] * len(tokens)).text + whole.finish(stopped=False).text == shown


def test_a_stop_string_is_cut_and_no_part_of_it_shown_before(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], ["<end>"])
    assert pieces(stream, ids(tokenizer, "a<enough<end>"), stopped=True) == [
        *["a", "", "", "", "<eno", "u", "g", "h"],
        *["", "", "", "", "", ""],
    ]
    assert (stream.stopped, stream.stop) == (True, "<end>")


def test_a_stop_string_of_a_special_token_and_text_is_cut(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], [f"b{END}cd"])
    tokens = ids(tokenizer, f"ab{END}cbb{END}cd")
    assert pieces(stream, tokens, stopped=True) == ["a", "", "", "", "bc", "b", "", "", "", ""]
    assert stream.stopped


def test_special_tokens_that_are_part_of_the_text_are_shown(tokenizer: BaseTokenizer):
    tags = tokenizer.special_ids([BEGIN, "no token"])
    tokens = ids(tokenizer, f"é{BEGIN} b{END}{BEGIN}é{END}")
    given = pieces(TextStream(tokenizer, [], [f"{BEGIN}é"], tags), tokens[:-3])
    assert given == ["", "é", "", f"{BEGIN} ", "b", "", "", BEGIN]
    stream = TextStream(tokenizer, [], [f"{BEGIN}é"], tags)
    assert "".join(pieces(stream, tokens)) == f"é{BEGIN} b"
    assert stream.stopped
    half = TextStream(tokenizer, [], [], tags)
    assert "".join(pieces(half, [*ids(tokenizer, "aé")[:-1], *ids(tokenizer, f"{BEGIN}b")])) == f"a\ufffd{BEGIN}b"


def test_an_added_token_that_is_not_special_is_in_the_text_anyway(tokenizer: BaseTokenizer):
    core = Tokenizer.from_str(tokenizer.core.to_str())
    core.add_tokens(["<tool_call>"])
    assert BaseTokenizer(core, {}, {}).special_ids(["<tool_call>", END]) == {257: END}
    assert "".join(pieces(TextStream(BaseTokenizer(core, {}, {}), [], []), [258])) == "<tool_call>"


def test_letters_with_a_special_token_between_them_are_no_stop_string_as_in_the_sampler(tokenizer: BaseTokenizer):
    stream = TextStream(tokenizer, [], ["bc"])
    assert "".join(pieces(stream, ids(tokenizer, f"ab{END}cd"))) == "abcd"
    assert (stream.stopped, stream.stop) == (False, None)


@pytest.mark.parametrize("stops", [["d", "bc"], ["bc", "d"], ["bcd", "bc"], ["cd", "bcd"]])
def test_the_stop_string_that_ends_a_text_is_named(tokenizer: BaseTokenizer, stops: list[str]):
    stream = TextStream(tokenizer, [], stops)
    assert "".join(pieces(stream, ids(tokenizer, "abcd"), stopped=True)) == "a"
    assert stream.stop == next(stop for stop in ("bc", "bcd") if stop in stops)


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
    prompt=st.lists(st.integers(0, 257), max_size=12),
)
def test_however_tokens_are_cut_the_text_is_that_of_all_of_them(
    tokenizer: BaseTokenizer, tokens: list[int], cuts: list[int], prompt: list[int]
):
    text, reported = in_pieces(TextStream(tokenizer, prompt, []), tokens, cuts)
    assert text == tokenizer.decode(tokens)
    assert reported == list(range(len(tokens)))


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*"abAB é", BEGIN, END]), max_size=20),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    stops=st.lists(st.text("abAB é", min_size=1, max_size=3) | st.sampled_from(["_s", f"b{END}", BEGIN]), max_size=3),
    prompt=st.lists(st.integers(0, 257), max_size=12),
)
def test_however_tokens_are_cut_the_text_ends_before_the_first_stop_string(
    tokenizer: BaseTokenizer, parts: list[str], cuts: list[int], stops: list[str], prompt: list[int]
):
    tokens = [token for part in parts for token in ids(tokenizer, part)]
    text, reported = in_pieces(TextStream(tokenizer, prompt, stops), tokens, cuts)
    assert text == up_to_stop(parts, stops)
    assert reported == list(range(len(reported)))
    assert len(reported) == len(tokens) or any(stop in "".join(parts) for stop in stops)


def in_pieces(stream: TextStream, tokens: list[int], cuts: list[int]) -> tuple[str, list[int]]:
    """The text of all pieces, and the positions of all reported tokens."""
    found, begin = [], 0
    for cut in cuts:
        found.append(stream.push(tokens[begin : begin + cut], [0.0] * len(tokens[begin : begin + cut])))
        begin += cut
    found.append(stream.finish(stopped=False))
    return "".join(piece.text for piece in found), [token.position for piece in found for token in piece.tokens]


def up_to_stop(parts: list[str], stops: list[str]) -> str:
    """The characters before the stop string that is complete first. It may be in the text of a special token, as in the
    samplers."""
    whole, shown = "", ""
    for part in parts:
        whole, shown = whole + part, shown + (part if len(part) == 1 else "\0" * len(part))
        places = [place for stop in stops if (place := whole.find(stop)) >= 0]
        if places:
            shown = shown[: min(places)]
            break
    return shown.replace("\0", "")


def test_a_tokenizers_own_words_keep_their_spaces():
    """The tokenizer removes the space before the first word of a text. The first word of an answer follows its prompt,
    so it keeps its space."""
    core = letter_tokenizer()
    one, *two = (core.token_to_id(letter) for letter in "a▁b")
    assert "".join(pieces(TextStream(BaseTokenizer(core, {}, {}), [one], []), two)) == " b"
