"""vLLM's own offline `LLM.generate`, with the engine arguments that the Tinsmith sampler gives it.

`python -m ops.bench.bare_vllm BASE_MODEL_JSON TOKENS` is the side that measures, with so many tokens a sample. The
adapter comes from bare_sampler.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from app.settings import BaseModelSettings
from ops.bench import side, timing
from ops.bench.bare_sampler import requests, write_adapters
from workers.backends.sampling.vllm import checks
from workers.backends.sampling.vllm import engine as vllm_engine
from workers.backends.sampling.vllm.arguments import engine_args
from workers.models import base_model

Samples = dict[str, list[float]]


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of the prompts with four samples each, and of one call with as many single samples."""
    settings = BaseModelSettings.model_validate_json(sys.argv[1])
    checks.check_install()
    vllm_engine.set_environment(settings)
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    engine = LLM(**arguments(settings))
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-bench-"))
    adapter = LoRARequest("a0", 1, str(write_adapters(settings.path, folder)["a0"]))
    asked = requests(AutoConfig.from_pretrained(settings.path).vocab_size, int(sys.argv[2]))
    prompts: list[Any] = [{"prompt_token_ids": request.prompt.tolist()} for request in asked]
    calls = {
        "four each": partial(_generate_ms, engine, prompts, adapter, asked[0].num_samples, asked[0].max_tokens),
        "single": partial(_generate_ms, engine, prompts * asked[0].num_samples, adapter, 1, asked[0].max_tokens),
    }
    return partial(timing.alternate, sides=calls)


def arguments(settings: BaseModelSettings) -> dict[str, Any]:
    """Returns the engine arguments, with the context and the dtype that the sampler chooses."""
    skeleton = base_model.skeleton(settings)
    dtype = base_model.choose_dtype(settings.dtype, torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    context = base_model.describe(settings, skeleton, dtype).max_context
    return engine_args(settings, skeleton, context, str(dtype).removeprefix("torch."))


def _generate_ms(engine: Any, prompts: list[Any], adapter: Any, samples: int, tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(n=samples, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    return timing.timed_ms(lambda: engine.generate(prompts, params, lora_request=adapter, use_tqdm=False))


if __name__ == "__main__":
    side.serve(prepare)
