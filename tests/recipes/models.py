"""Two tiny base models under the names that the cookbook's programs have as defaults, and a stack that serves them."""

from __future__ import annotations

from pathlib import Path

from tests.contract.stack import Stack
from tests.models import EOS_TOKEN, byte_tokenizer
from tests.parity.architectures import config_of, save
from tests.recipes.data import ANSWER
from tests.servers import free_port

BASE, CHAT = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B"
_TRAINER, _SAMPLER = 'backend = "torch"', 'backend = "transformers"'


def serving(folder: Path) -> Stack:
    """A stack, not started, that serves both models."""
    base = tiny_qwen3_5(folder / "base", spread=0.1)
    chat = f"""[[base_models]]
name = "{CHAT}"
path = "{tiny_qwen3_5(folder / "chat", spread=0.15)}"
dtype = "float32"
[base_models.trainer]
{_TRAINER}
[base_models.sampler]
{_SAMPLER}
"""
    return Stack(
        folder / "data", base, free_port(), _TRAINER, _SAMPLER, chat, "tests.warm_workers", threads=1, name=BASE
    )


def tiny_qwen3_5(folder: Path, spread: float) -> Path:
    """Saves a random Qwen3.5 in its published layout: a text model of recurrent and attention layers, and a vision
    tower. `spread` is the standard deviation of its weights. Its context has 8,192 tokens.

    The tokenizer has the tokens that Qwen3.5's renderer needs. Eight more tokens are right answers, so that a random
    model solves some problems, and fails at others.
    """
    tokenizer = byte_tokenizer("<think>", "</think>", *(f"{letter}\\boxed{{{ANSWER}}}" for letter in "abcdefgh"))
    config = config_of("qwen3.5, vision")
    config.text_config.max_position_embeddings = tokenizer.model_max_length = 8192
    config.text_config.initializer_range = spread
    config.text_config.eos_token_id = tokenizer.convert_tokens_to_ids(EOS_TOKEN)
    tokenizer.save_pretrained(save(config, folder))
    return folder
