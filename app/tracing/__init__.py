"""OpenTelemetry traces: one for each future, from the request that admits it to the poll that returns its result."""
