"""Which sampler serves a base model."""

from __future__ import annotations

from app.settings import BaseModelSettings
from workers.sampling.base import SamplerBackend


def create(settings: BaseModelSettings, *, full: bool = False) -> SamplerBackend:
    """The backend the settings ask for; "auto" is vLLM where there is a GPU, else transformers.

    `full`: what it loads is all weights of a model, one at a time, in the place of its base's.

    Raises SetupError when vLLM is asked for and cannot run here.
    """
    if _backend(settings) == "vllm":
        from workers.sampling.vllm_backend import VllmSampler

        return VllmSampler(settings, full=full)
    from workers.sampling.transformers_backend import TransformersSampler

    return TransformersSampler(settings, full=full)


def _backend(settings: BaseModelSettings) -> str:
    if settings.sampler.backend != "auto":
        return settings.sampler.backend
    import torch

    return "vllm" if torch.cuda.is_available() else "transformers"
