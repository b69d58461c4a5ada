"""Both samplers, and the answers expected from them by plain transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.errors import ServerOpError
from app.settings import BaseModelSettings, SamplerSettings
from tests import warm_vllm
from tests.models import VOCAB_SIZE
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend

warm_vllm.use()

BACKENDS = {
    "transformers": SamplerSettings(backend="transformers", max_batch=16, max_loras=2),
    # Prompts of more than 64 tokens are run in chunks.
    "vllm": SamplerSettings(
        backend="vllm",
        max_batch=16,
        max_loras=2,
        memory_share=0.05,
        engine_args={"max_num_batched_tokens": 64, "block_size": 32},
    ),
}
BACKENDS["vllm on two ranks"] = BACKENDS["vllm"].model_copy(update={"tensor_parallel": 2})

CONTEXT = 256
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
ADAPTERS = ("one", "two", "three")
PROMPTS = [
    np.random.default_rng(i).integers(0, 256, size=length).astype(np.int32) for i, length in enumerate((5, 40, 1, 90))
]
_TOKENS = 12
# The largest difference of a logprob. Logits of 2 to 4 are 2^-6 = 0.016 apart in bf16; in it, vLLM's CPU build and
# transformers differ by up to 0.032 on these models. Another adapter's logprob differs by 0.6 on average.
_ATOL = {"float32": 1e-3, "bfloat16": 0.1}
# In bf16 another batch may change a logit by 0.01, and so each 200th draw or fewer: on average 0.97 of a sample of 12
# tokens, and 0.86 of one of 60, are before such a draw. Samples of another seed have hardly a first token in common.
_REPEATED = 0.5


@dataclass(frozen=True, eq=False)
class Reference:
    """The base model and each adapter in plain transformers and PEFT, in one dtype."""

    folder: Path
    adapters: dict[str, Path]
    dtype: str = "float32"

    @cache  # noqa: B019 - one a module
    def in_dtype(self, dtype: str) -> Reference:
        return replace(self, dtype=dtype)

    @property
    def atol(self) -> float:
        return _ATOL[self.dtype]

    @cache  # noqa: B019 - one a module
    def model(self, adapter: str | None) -> Any:
        # Not merged: with a tied head, a merge would change the embedding too.
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self.dtype))
        if adapter is None:
            return base
        return PeftModel.from_pretrained(base, self.adapters[adapter], autocast_adapter_dtype=False).to(base.dtype)

    def table(self, adapter: str | None, tokens: np.ndarray) -> torch.Tensor:
        """Returns the log-softmax after each token, float32 [L, V]."""
        with torch.no_grad():
            logits = self.model(adapter)(torch.from_numpy(tokens.astype(np.int64))[None]).logits
        return logits[0].float().log_softmax(-1)

    def greedy(self, adapter: str | None, prompt: np.ndarray, tokens: int) -> list[int]:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        model = self.model(adapter)
        model.generation_config.eos_token_id = None
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
        return out[0, len(prompt) :].tolist()

    def logprobs(self, adapter: str | None, tokens: np.ndarray) -> np.ndarray:
        """Returns the logprob of each token but the first, given those before it, float32 [L-1]."""
        following = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
        return self.table(adapter, tokens)[:-1].gather(-1, following)[:, 0].numpy()

    def assert_greedy(self, adapter: str | None, prompt: np.ndarray, tokens: np.ndarray) -> None:
        """Checks that these 12 tokens are those of plain generate; in bf16, that each is nearly the likeliest."""
        if self.dtype == "float32":
            assert tokens.tolist() == self.greedy(adapter, prompt, _TOKENS)
            return
        assert len(tokens) == _TOKENS
        whole = np.concatenate([prompt, tokens])
        likeliest = self.table(adapter, whole)[:-1].max(-1).values.numpy()
        behind = (likeliest - self.logprobs(adapter, whole))[-len(tokens) :]
        assert behind.max() < self.atol

    def assert_repeated(self, found: Sequence[list[int]], wanted: Sequence[list[int]]) -> None:
        """Checks that samples of the same seeds in another batch are equal; in bf16, that half of their tokens and more
        are before the first that differs."""
        if self.dtype == "float32":
            assert found == wanted
            return
        shares = [_equal_tokens(*pair) / len(pair[1]) for pair in zip(found, wanted, strict=True)]
        assert np.mean(shares) > _REPEATED


def _equal_tokens(found: list[int], wanted: list[int]) -> int:
    """The number of tokens before the first that differs."""
    return next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), len(found))


def make_reference(folder: Path) -> Reference:
    """The base model in `folder`, and an adapter for each of ADAPTERS that this makes there."""
    torch.set_num_threads(2)
    adapters = {name: _save_adapter(folder, folder / name, seed) for seed, name in enumerate(ADAPTERS)}
    return Reference(folder, adapters)


def _save_adapter(base: Path, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def settings_of(name: str, folder: Path) -> BaseModelSettings:
    """The settings of the sampler of BACKENDS by that name: in float32, except of vLLM on a GPU, which runs no adapters
    in it."""
    on_gpu = torch.cuda.is_available() and BACKENDS[name].backend == "vllm"
    dtype = "bfloat16" if on_gpu else "float32"
    return BaseModelSettings(
        name="tiny", path=str(folder), dtype=dtype, max_context=CONTEXT, max_rank=8, sampler=BACKENDS[name]
    )


@contextmanager
def opened(name: str, reference: Reference) -> Iterator[SamplerBackend]:
    """Opens the sampler of BACKENDS by that name with every adapter; closes it in the middle of a request."""
    settings = settings_of(name, reference.folder)
    backend = create(settings)
    info = backend.open()
    assert (info.vocab_size, info.max_context, info.dtype) == (VOCAB_SIZE, CONTEXT, settings.dtype)
    assert info.trainable_groups == ("attn", "mlp", "unembed")
    for adapter, folder in reference.adapters.items():
        backend.load(adapter, folder)
    yield backend
    with ThreadPoolExecutor(1) as pool:
        unfinished = pool.submit(backend.sample, None, ask(PROMPTS[0], num_samples=512, max_tokens=200))
        backend.close()
        with pytest.raises(ServerOpError, match="the worker is shutting down"):
            unfinished.result()
    assert not backend.healthy()


def ask(prompt: np.ndarray, **fields: Any) -> SampleRequest:
    return SampleRequest(
        **{"prompt": prompt, "num_samples": 1, "max_tokens": _TOKENS, "seed": 1, "ignore_eos": True, **fields}
    )


def tokens_of(output: SampleOutput) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in output.sequences]


def one(backend: SamplerBackend, adapter: str | None, prompt: np.ndarray, **fields: Any) -> SampledSequence:
    (sequence,) = backend.sample(adapter, ask(prompt, **fields)).sequences
    return sequence
