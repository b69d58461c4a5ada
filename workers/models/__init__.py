"""Models in memory: loads a base model, and adds LoRA adapters to it."""
