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
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from app.domain.adapters import KEY_PREFIX
from workers.backends.sampling.vllm import patches
from workers.backends.sampling.vllm import requests as vllm_requests
from workers.models import full_weights

SAMPLER_PID_VARIABLE = "TINSMITH_SAMPLER_PID"


class Extension:
    """vLLM adds this class to its worker's bases; the engine can then call its methods there."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def adapted(self, paths: Sequence[str]) -> list[str]:
        """Returns the modules of this worker on which vLLM runs an adapter's pairs, of those at `paths` in PEFT files.

        As it loads an adapter, vLLM renames modules and joins some (q, k and v), and drops in silence those that it did
        not prepare for adapters at its start.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name

        manager = self.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        renames = None if mapper is None else mapper.get_rename_mapper()
        prepared = {*manager.modules, *chain.from_iterable(manager.packed_modules.values())}
        names = {path: parse_fine_tuned_lora_name(f"{KEY_PREFIX}{path}.lora_A.weight", renames)[0] for path in paths}
        return [path for path, name in names.items() if name in prepared]

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
    patches.refuse_lora_experts()
    patches.repair_prompt_scores()
    patches.repair_logprobs_under_grammar()
    vllm_requests.install_scoring()
    if not torch.cuda.is_available():
        patches.repair_cpu()
    threading.Thread(target=_exit_with, args=(int(os.environ[SAMPLER_PID_VARIABLE]),), daemon=True).start()
