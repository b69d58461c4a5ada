"""What vLLM 0.32 leaves out for lm_head, in its workers: adapters on it for classes that do not declare it (Qwen2 and
Mistral), and new weights for one that is tied.

vLLM's LoRA code handles any lm_head that its class names in `embedding_modules`; those classes have one and just do
not name it. A class without an lm_head of its own (Gemma's is the embedding) stays as it is.
"""

from __future__ import annotations

from typing import Any


def declare() -> None:
    """Make vLLM name lm_head in models that have one, before it looks for what adapters can sit on."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    load = LoRAModelRunnerMixin.load_lora_model

    def load_lora_model(self: Any, model: Any, *args: Any) -> Any:
        if hasattr(model, "lm_head") and hasattr(model, "logits_processor"):
            model.embedding_modules = {**model.embedding_modules, "lm_head": "output_embeddings"}
        return load(self, model, *args)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model


def renew(model: Any) -> None:
    """Behind new weights: a tied head is a module without any of its own, which is passed over.

    It has the embedding's parameter, but on a CPU a copy of that, packed for its kernel, to compute with.
    """
    if model.config.tie_word_embeddings and hasattr(model, "lm_head"):
        method = getattr(model.lm_head, "quant_method", None)  # a rank of a pipeline may have a stand-in for the head
        if method is not None:
            method.process_weights_after_loading(model.lm_head)
