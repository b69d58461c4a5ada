from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.tokenizers import letter_tokenizer
from workers.backends.sampling.vocabulary import StopText, load_vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path_factory.mktemp("base"))).backend_tokenizer


def completed_at(tokenizer, stops: tuple[str, ...], text: str, prompt: str = "Hi") -> int | None:
    """Number of tokens until completion, one per byte."""
    watch = StopText(tokenizer, tokenizer.encode(prompt).ids, stops)
    return next((n for n, token in enumerate(tokenizer.encode(text).ids, 1) if watch.completes(token)), None)


def test_the_token_that_completes_a_stop_string_is_found(tokenizer):
    assert completed_at(tokenizer, ("END",), "an END here") == 6
    assert completed_at(tokenizer, ("zzz", "n E"), "an END here") == 4
    assert completed_at(tokenizer, ("x",), "axb") == 2
    assert completed_at(tokenizer, ("z", "END"), "an END here") == 6


def test_a_stop_string_that_is_not_there_is_not_found(tokenizer):
    assert completed_at(tokenizer, ("END",), "EN D, E ND") is None


def test_a_stop_string_of_several_bytes_a_character_is_found_at_its_last_byte(tokenizer):
    assert completed_at(tokenizer, ("é…",), "caf" + "é…") == 3 + 2 + 3


def test_a_stop_string_does_not_begin_in_the_prompt(tokenizer):
    assert completed_at(tokenizer, ("END",), "D END", prompt="EN") == 5


def test_a_prompt_that_ends_in_half_a_character_is_not_searched(tokenizer):
    prompt, rest = (tokenizer.encode(text).ids for text in ("the END 😀", "\n"))
    watch = StopText(tokenizer, prompt[:-2], ("END", "\n"))
    assert [watch.completes(token) for token in [*prompt[-2:], *rest]] == [False, False, True]


def test_a_special_token_can_be_a_stop_string(tokenizer):
    assert completed_at(tokenizer, ("<|im_end|>",), "ab<|im_end|>") == 3


def test_a_stop_string_behind_bytes_that_are_no_character_is_found():
    core = letter_tokenizer()
    watch = StopText(core, [], ("\ufffd ab",))
    tokens = [ord("z"), 0x9D, *(core.token_to_id(letter) for letter in "▁abc")]
    assert [watch.completes(token) for token in tokens[:5]] == [False, False, False, False, True]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_every_end_token_of_the_tokenizer_and_of_the_model_ends_a_sample(tmp_path: Path, file: str):
    """Chat models have several. Older models have no generation config, and name theirs in their own."""
    folder = tiny_qwen3(tmp_path)
    (folder / "generation_config.json").rename(tmp_path / "generation")
    named = tmp_path / "generation" if file == "generation_config.json" else folder / file
    (folder / file).write_text(json.dumps({**json.loads(named.read_text()), "eos_token_id": [3, 5]}))
    own = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert own not in (3, 5)
    assert load_vocabulary(BaseModelSettings(name="tiny", path=str(folder))).end_tokens == {own, 3, 5}
