"""Sampler backends behind one protocol (base.py): transformers and vLLM, each on a CPU or a GPU."""
