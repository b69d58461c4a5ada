"""What Tinsmith talks about: Ops, batches, results, model specs, checkpoints. Frozen data, no I/O."""
