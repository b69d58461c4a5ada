"""What Tinsmith keeps: interfaces.py states the promises, redis/ holds the journal, objects/ the checkpoints."""
