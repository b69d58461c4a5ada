"""Sampler backends behind one protocol (base.py): transformers on a CPU, vLLM on a GPU."""
