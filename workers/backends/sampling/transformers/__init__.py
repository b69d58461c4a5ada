"""The sampling backend over transformers."""
