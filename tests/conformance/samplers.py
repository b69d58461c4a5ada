"""Both samplers, and the answers expected from them by plain transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
from tests.models import VOCAB_SIZE
from workers.backends.sampling.base import SamplerBackend, create

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


@dataclass(frozen=True, eq=False)
class Reference:
    """The base model and each adapter in plain transformers and PEFT."""

    folder: Path
    adapters: dict[str, Path]

    @cache  # noqa: B019 - one a module
    def model(self, adapter: str | None) -> Any:
        # Not merged: with a tied head, a merge would change the embedding too.
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return base if adapter is None else PeftModel.from_pretrained(base, self.adapters[adapter])

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


@contextmanager
def opened(name: str, reference: Reference) -> Iterator[SamplerBackend]:
    """Opens the sampler of BACKENDS by that name with every adapter; closes it in the middle of a request."""
    settings = BaseModelSettings(
        name="tiny",
        path=str(reference.folder),
        dtype="float32",
        max_context=CONTEXT,
        max_rank=8,
        sampler=BACKENDS[name],
    )
    backend = create(settings)
    info = backend.open()
    assert (info.vocab_size, info.max_context, info.dtype) == (VOCAB_SIZE, CONTEXT, "float32")
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
        **{"prompt": prompt, "num_samples": 1, "max_tokens": 12, "seed": 1, "ignore_eos": True, **fields}
    )


def tokens_of(output: SampleOutput) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in output.sequences]


def one(backend: SamplerBackend, adapter: str | None, prompt: np.ndarray, **fields: Any) -> SampledSequence:
    (sequence,) = backend.sample(adapter, ask(prompt, **fields)).sequences
    return sequence
