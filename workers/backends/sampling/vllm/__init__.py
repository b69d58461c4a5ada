"""The sampling backend over vLLM."""
