"""The products of many adapters on one linear, for a GPU and for a CPU."""
