"""Tiny base models for tests: random weights, a real architecture, a tokenizer that needs no network.

head_dim is 32 because vLLM's CPU attention refuses 16; the head is tied because the bundled real model's is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tokenizers import WITH_TOOLS

VOCAB_SIZE = 320
EOS_TOKEN = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)


def tiny_qwen3(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """Saves a random Qwen3 and a byte-level tokenizer in `folder`.

    The model is fp32 with vocab 320, 2 layers of width 64 and a tied head. `sizes` override fields of Qwen3Config.
    """
    with _random(seed):
        model = Qwen3ForCausalLM(Qwen3Config(**{**_shape(), "head_dim": 32, **sizes}))
    return _save(model, folder)


def tiny_qwen2(folder: Path) -> Path:
    """Saves a random Qwen2 of the same sizes, with the same tokenizer."""
    with _random(0):
        model = Qwen2ForCausalLM(Qwen2Config(**_shape()))
    return _save(model, folder)


def tiny_opt(folder: Path) -> Path:
    """Saves a random OPT. Its linears fc1 and fc2 are in no group of weights that LoRA adapters cover."""
    with _random(0):
        model = OPTForCausalLM(OPTConfig(**_shape(), ffn_dim=128, word_embed_proj_dim=64))
    return _save(model, folder)


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": _token_ids()[EOS_TOKEN],
        "pad_token_id": _token_ids()["<|endoftext|>"],
        # The default 0.02 leaves the distribution almost flat, which would hide wrong logprobs.
        "initializer_range": 0.1,
        "dtype": "float32",
    }


@contextmanager
def _random(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _token_ids() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: i for i, token in enumerate([*alphabet, *_SPECIAL])}


def byte_tokenizer(*more_special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, then the special tokens, of which the first is 256; no other id is
    produced."""
    core = Tokenizer(models.BPE(vocab=_token_ids(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS_TOKEN,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *more_special],
        model_max_length=512,
    )
    tokenizer.chat_template = WITH_TOOLS
    return tokenizer
