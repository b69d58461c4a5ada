"""The sampler over transformers."""
