"""Adapters on lm_head for vLLM classes that do not declare it (Qwen2 and Mistral in vLLM 0.32), in its workers.

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
