"""Calls a sampler backend directly, in its own process: base model, one adapter, four adapters mixed, and one sample
alone beside `generate` of transformers and PEFT.

`python -m ops.bench.bare_sampler BASE_MODEL_JSON` is the side that measures.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.ops import LoraSpec
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings
from ops.bench import batches, side, timing
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend
from workers.models import lora, peft_files

PROMPTS, SAMPLES, TOKENS = 16, 4, 64
_PROMPT_TOKENS = 32
_RANK = 32
_ADAPTERS = ("a0", "a1", "a2", "a3")
# Size of B after a few hundred steps at 1e-4.
_B_STD = 0.01
Samples = dict[str, list[float]]


def requests(vocab_size: int, tokens: int = TOKENS) -> list[SampleRequest]:
    """Requests of so many tokens each, whatever is sampled."""
    rows = batches.random_tokens(PROMPTS, _PROMPT_TOKENS, vocab_size)
    return [SampleRequest(row, SAMPLES, tokens, seed, ignore_eos=True) for seed, row in enumerate(rows)]


def write_adapters(path: str, folder: Path) -> dict[str, Path]:
    """Writes PEFT folders of adapters on every linear layer, head included, with a non-zero B."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    written = {}
    for seed, name in enumerate(_ADAPTERS):
        adapter = lora.new_adapter(model, LoraSpec(_RANK, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        for pair in adapter.pairs.values():
            pair.b.data.normal_(0.0, _B_STD, generator=generator)
        written[name] = folder / name
        written[name].mkdir()
        peft_files.write(adapter, written[name], path)
    return written


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of all requests at once, for each kind in turn. With vLLM that is one adapter only: on
    a CPU a round of one kind takes minutes."""
    settings = BaseModelSettings.model_validate_json(sys.argv[1])
    backend = create(settings)
    info = backend.open()
    asked = requests(info.vocab_size)
    kinds: dict[str, Sequence[str | None]] = {"one adapter": _ADAPTERS[:1]}
    whole = settings.sampler.backend != "vllm"
    if whole:
        kinds |= {"base": [None], "four adapters": _ADAPTERS}
    calls = {kind: partial(_sample_ms, backend, asked, names) for kind, names in kinds.items()}
    with tempfile.TemporaryDirectory() as folder:
        written = write_adapters(settings.path, Path(folder))
        for name in written if whole else _ADAPTERS[:1]:
            backend.load(name, written[name])
            # vLLM reads the files when it first runs the adapter.
            backend.sample(name, asked[0])
        if whole:
            alone = replace(asked[0], num_samples=1)
            generating = _generator(settings.path, info.dtype, written[_ADAPTERS[0]])
            calls["alone"] = partial(_sample_ms, backend, [alone], _ADAPTERS[:1])
            calls["generate"] = partial(_generate_ms, generating, torch.from_numpy(alone.prompt).long()[None])
    return partial(timing.alternate, sides=calls)


def _generator(path: str, dtype: str, adapter: Path) -> Any:
    """The base model under one adapter, by transformers and PEFT alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return PeftModel.from_pretrained(model, adapter).eval()


def _generate_ms(model: Any, prompt: Tensor) -> float:
    return timing.timed_ms(
        lambda: model.generate(input_ids=prompt, do_sample=True, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
    )


def _sample_ms(backend: SamplerBackend, asked: Sequence[SampleRequest], adapters: Sequence[str | None]) -> float:
    """Runs request i under adapters[i mod n], each in its own thread."""
    with ThreadPoolExecutor(len(asked)) as threads:
        chosen = [adapters[i % len(adapters)] for i in range(len(asked))]
        return timing.timed_ms(lambda: list(threads.map(backend.sample, chosen, asked)))


if __name__ == "__main__":
    side.serve(prepare)
