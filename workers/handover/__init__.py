"""New weights on their way to samplers: through this machine's memory, and behind that to the object store."""
