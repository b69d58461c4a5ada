"""The sampler over vLLM."""
