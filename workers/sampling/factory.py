"""Which sampler serves a base model."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from app.errors import SetupError
from app.settings import BaseModelSettings
from app.stack.checks import NO_VLLM
from workers.sampling.base import SamplerBackend

log = logging.getLogger(__name__)


def create(settings: BaseModelSettings, *, full: bool = False) -> SamplerBackend:
    """The backend the settings ask for; "auto" is vLLM where there is a GPU and vLLM is installed, else transformers.

    `full`: what it loads is all weights of a model, one at a time, in the place of its base's.

    Raises SetupError when a GPU is asked for that is not there. `open` does when vLLM is asked for and cannot run here.
    """
    import torch

    gpus = torch.cuda.device_count()
    check_devices(settings.sampler.devices, gpus)
    if choose(settings.sampler.backend, gpus, vllm=find_spec("vllm") is not None) == "vllm":
        from workers.sampling.vllm_backend import VllmSampler

        return VllmSampler(settings, full=full)
    from workers.sampling.transformers_backend import TransformersSampler

    return TransformersSampler(settings, full=full)


def choose(asked: str, gpus: int, *, vllm: bool) -> str:
    """The backend on a machine with so many GPUs, and with vLLM or without; says so when a GPU has to do without."""
    if asked != "auto":
        return asked
    if gpus and not vllm:
        log.warning(NO_VLLM)
    return "vllm" if gpus and vllm else "transformers"


def check_devices(named: tuple[int, ...], gpus: int) -> None:
    """`gpus`: how many torch sees, which are among those named. Raises SetupError when some are missing."""
    if len(named) > gpus:
        seen = f"only {gpus} of them" if gpus else "no GPU"
        raise SetupError(f"sampler.devices is {list(named)} but torch sees {seen} here; correct the list")
