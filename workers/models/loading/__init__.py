"""Loading a base model: its source, the steps that transformers takes with each weight, and rotary frequencies."""
