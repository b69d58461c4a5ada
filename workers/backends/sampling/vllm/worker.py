"""The extension that vLLM's own worker processes load (its `worker_extension_cls`) before they load the model.

It lets adapters sit on any lm_head, loads fully fine-tuned models, scores prompts and repairs faults of vLLM 0.32.
It also ends its process when the sampler dies: vLLM's engine process ends when its workers do, but does not notice
when the sampler that started it is killed.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from workers.backends.sampling.vllm import patches
from workers.backends.sampling.vllm import requests as vllm_requests
from workers.models import full_weights

SAMPLER_PID_VARIABLE = "TINSMITH_SAMPLER_PID"


class Extension:
    """vLLM adds this class to its worker's bases; the engine can then call its methods there."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def adapts_head(self) -> bool:
        """Returns whether adapters may sit on lm_head."""
        return "lm_head" in self.model_runner.lora_manager.embedding_modules

    def replace_weights(self, folder: str, names: Sequence[str]) -> None:
        """Overwrites all of a model's weights, layer by layer, with the tensors of these names."""
        self.reload_weights(weights_iterator=full_weights.tensors_in(Path(folder), set(names)))
        patches.renew_lm_head(self.model_runner.get_model())


def _exit_with(pid: int) -> None:
    try:
        alive = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.poll()
    os._exit(1)


def _in_worker() -> bool:
    """Returns whether this is a vLLM worker process: the sampler itself imports this file too, for its names."""
    return os.environ.get(SAMPLER_PID_VARIABLE, str(os.getpid())) != str(os.getpid())


if _in_worker():
    patches.declare_lm_heads()
    patches.adapt_shared_values()
    patches.repair_prompt_scores()
    patches.repair_logprobs_under_grammar()
    vllm_requests.install_scoring()
    if not torch.cuda.is_available():
        patches.repair_cpu()
    threading.Thread(target=_exit_with, args=(int(os.environ[SAMPLER_PID_VARIABLE]),), daemon=True).start()
