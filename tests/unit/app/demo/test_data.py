from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from app.demo.training import HABIT, PROMPTS, Conversation, answer_tokens, conversations, datum, prompt_tokens
from tests.models import tiny_qwen3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path_factory.mktemp("model")))


def test_every_answer_has_the_habit_and_no_shown_prompt_is_in_the_data():
    data = conversations()
    assert len({c.question for c in data}) == 36
    assert all(c.answer.endswith(HABIT) for c in data)
    assert not {c.question for c in data} & set(PROMPTS)


def test_the_loss_counts_the_answer_and_its_end_mark_and_nothing_else(tokenizer):
    conversation = Conversation("Who are you?", "A tinsmith.")
    made = datum(tokenizer, conversation)
    targets = made.loss_fn_inputs["target_tokens"].to_numpy()
    weights = made.loss_fn_inputs["weights"].to_numpy()
    assert tokenizer.decode(targets[weights == 1]) == conversation.answer + tokenizer.eos_token
    assert answer_tokens(made) == weights.sum() > 0


def test_each_target_is_the_token_after_its_input(tokenizer):
    made = datum(tokenizer, Conversation("Who are you?", "A tinsmith."))
    tokens = made.model_input.to_ints()
    assert tokens[1:] == made.loss_fn_inputs["target_tokens"].to_numpy()[:-1].tolist()
    prompt = prompt_tokens(tokenizer, "Who are you?")
    assert tokens[: len(prompt)] == prompt
