"""The domain types of Tinsmith: Ops, batches, results, model specs, checkpoints. Frozen data, no I/O."""
