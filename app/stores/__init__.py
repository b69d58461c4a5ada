"""The stores: interfaces/ states the promises, redis/ holds the journal, objects/ the checkpoints."""
