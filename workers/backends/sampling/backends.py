"""The sampling backends, transformers and vLLM, and `create`, which makes the one that the settings name."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from app.errors import SetupError
from app.settings import NO_VLLM, BaseModelSettings
from workers.backends.devices import check_gpus, have_bfloat16
from workers.backends.sampling.base import SamplerBackend

log = logging.getLogger(__name__)
_NO_BFLOAT16 = (
    "a GPU of compute capability below 8.0 does not compute in bfloat16, in which vLLM would sample, so the slower "
    "transformers sampler is used"
)


def create(settings: BaseModelSettings, *, full: bool = False) -> SamplerBackend:
    """Makes the backend the settings ask for; "auto" is vLLM if it is installed and the GPUs compute in bfloat16, else
    transformers.

    `full`: it loads all weights of a model, one model at a time, in the place of the base's weights.

    Raises SetupError if the settings name a GPU that this machine does not have. If the settings name vLLM and it
    cannot run here, `open` raises it instead.
    """
    check_gpus()
    gpus = torch.cuda.device_count()
    # The process is bound to its part of the devices (workers/cli.py).
    bound = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if settings.sampler.devices else []
    check_devices(bound, gpus, settings.sampler.gpus_needed)
    vllm = find_spec("vllm") is not None
    if choose(settings.sampler.backend, gpus, vllm=vllm, bfloat16=have_bfloat16()) == "vllm":
        from workers.backends.sampling.vllm.backend import VllmSampler

        return VllmSampler(settings, full=full)
    from workers.backends.sampling.transformers.backend import TransformersSampler

    return TransformersSampler(settings, full=full)


def choose(asked: str, gpus: int, *, vllm: bool, bfloat16: bool) -> str:
    """Returns the backend for a machine with `gpus` GPUs, with or without vLLM, whose GPUs compute in bfloat16 or not.

    Logs a warning when there is a GPU that vLLM does not use.
    """
    if asked != "auto":
        return asked
    if gpus and vllm and bfloat16:
        return "vllm"
    if gpus:
        log.warning(_NO_BFLOAT16 if vllm else NO_VLLM)
    return "transformers"


def check_devices(named: Sequence[str], gpus: int, needed: int) -> None:
    """Raises SetupError when a named GPU is missing, or when a sampler on GPUs has fewer than it needs. `gpus` counts
    the GPUs that torch sees, of those that are named."""
    if len(named) > gpus:
        seen = f"only {gpus} of them" if gpus else "no GPU"
        raise SetupError(f"sampler.devices is [{', '.join(named)}], but torch sees {seen} here; correct the list")
    if 0 < gpus < needed:
        raise SetupError(
            f"this sampler needs {needed} GPUs, but torch sees only {gpus} here; lower sampler.tensor_parallel, or "
            "give it more GPUs"
        )
