"""Training and sampling backends, each behind one protocol."""
