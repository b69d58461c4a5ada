"""The HTTP API: a module a resource holds its schemas and its views. A view is load, service, dump."""
