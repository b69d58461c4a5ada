"""Loaded into vLLM's own worker processes (its `worker_extension_cls`) before they load the model.

It lets adapters sit on any lm_head there, takes in whole models, scores prompts, repairs what vLLM 0.32 has wrong, and
lets no process outlive the sampler: vLLM's engine process ends when its workers do, but notices nothing when the
sampler that started it is killed.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workers.sampling import vllm_cpu, vllm_head, vllm_prompt_scores, vllm_scoring, whole_weights

SAMPLER_PID_VARIABLE = "TINSMITH_SAMPLER_PID"


class Extension:
    """vLLM adds this class to its worker's bases, and its methods to what the engine can call there."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def adapts_head(self) -> bool:
        """Whether adapters may sit on lm_head."""
        return "lm_head" in self.model_runner.lora_manager.embedding_modules

    def replace_weights(self, folder: str) -> None:
        """Write all of a model's weights over those that are there, layer by layer."""
        self.reload_weights(weights_iterator=whole_weights.tensors_in(Path(folder)))
        vllm_head.renew(self.model_runner.get_model())


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
    """The sampler itself imports this file too, for its names."""
    return os.environ.get(SAMPLER_PID_VARIABLE, str(os.getpid())) != str(os.getpid())


if _in_worker():
    vllm_head.declare()
    vllm_prompt_scores.repair()
    vllm_scoring.install()
    if not torch.cuda.is_available():
        vllm_cpu.repair()
    threading.Thread(target=_exit_with, args=(int(os.environ[SAMPLER_PID_VARIABLE]),), daemon=True).start()
