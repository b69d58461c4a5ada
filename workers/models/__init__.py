"""Models in memory: loading a base, and the LoRA adapters beside it."""
