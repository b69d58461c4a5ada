"""States of a trainer's models: weights, optimizer and pending gradient."""
