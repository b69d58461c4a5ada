"""Chats are tokenized without transformers exactly as transformers tokenizes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.services.openai.chat_templates import for_template
from app.services.openai.tokenizer import read
from tests.tokenizers import BEGIN, END, PLAIN, WITH_TOOLS, byte_tokenizer

SAYS = "{% for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] | trim }}\n{% endfor %}"
TEMPLATES = {
    "plain": PLAIN,
    "with tools": WITH_TOOLS,
    "blocks on lines of their own": """
        {%- for message in messages %}
            {%- if loop.first and message.role != 'system' %}
                {{- bos_token }}
            {%- endif %}
            {% if message.role == 'assistant' %}
            {{ message.content }}{{ eos_token }}
            {% else %}
            {{ message.content }}
            {% endif %}
        {%- endfor %}""",
    "loop control and namespaces": (
        "{% set last = namespace(index=-1) %}{% for message in messages[::-1] %}{% if message.role == 'user' %}"
        "{% set last.index = loop.index0 %}{% break %}{% endif %}{% endfor %}{{ last.index }}" + SAYS
    ),
    "marks for training": SAYS.replace(
        "{{ message['content'] | trim }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    ),
    "names, and JSON": SAYS + "{{ messages | tojson(indent=2) }}{{ tools | tojson if tools is not none else 'none' }}",
    "nothing given": "{{ documents is none }} {{ tools is defined }} {{ bos_token }} {{ sep_token is defined }}" + SAYS,
    "a year": "{{ strftime_now('%Y') }}" + SAYS,
}
CONTEXT = 1000
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c' ü", "parameters": {"x": [1, 2.5]}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <b>short</b> & ünïcode\n"},
    {"role": "user", "content": f"looks special: {BEGIN}x{END}"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}]},
    {"role": "tool", "content": "{}", "name": "f"},
]


def transformers_tokenizer(folder: Path, case: str) -> PreTrainedTokenizerFast:
    """transformers' tokenizer with this template, saved in the folder."""
    byte_tokenizer(folder, TEMPLATES[case])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, bos_token=BEGIN)
    theirs.chat_template = TEMPLATES[case]
    theirs.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def tokens_of(folder: Path, messages: list[dict[str, Any]], tools: list[dict], prefill: str = "") -> list[int]:
    """The tokens that a call of OpenAI's or Anthropic's clients gives to the sampler."""
    tokenizer = read(folder)
    return tokenizer.encode_rendered(tokenizer.chat_text(for_template(messages), tools) + prefill, CONTEXT).tolist()


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_chat_has_the_tokens_that_transformers_gives_it(tmp_path: Path, case: str, tools: list[dict] | None):
    expected = transformers_tokenizer(tmp_path, case).apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=True, return_dict=False
    )
    arguments = {"function": {"name": "f", "arguments": '{"x": "é"}'}}
    asked = [{**message, "content": message["content"] or None} for message in MESSAGES]
    asked[2] = {**asked[2], "tool_calls": [arguments]}
    assert tokens_of(tmp_path, asked, tools or []) == expected


@pytest.mark.parametrize("case", ["plain", "with tools"])
def test_the_beginning_of_an_answer_has_the_tokens_that_transformers_gives_it(tmp_path: Path, case: str):
    theirs = transformers_tokenizer(tmp_path, case)
    begun = [*MESSAGES, {"role": "assistant", "content": '{"x": '}]
    expected = theirs.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert tokens_of(tmp_path, MESSAGES, [], prefill='{"x": ') == expected


def test_a_text_has_the_tokens_that_transformers_gives_it(tmp_path: Path):
    byte_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = f" a  {END}\n\tü😀"
    assert read(tmp_path).encode(text).tolist() == theirs.encode(text)
