"""The stores: redis/ holds the journal and the records, objects/ holds the checkpoints."""
