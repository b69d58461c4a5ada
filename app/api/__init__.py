"""The HTTP API. One module for each resource holds its schemas and its views. A view loads the request, calls a service
and dumps the answer."""
