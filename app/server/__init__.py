"""The HTTP server: gunicorn's start in `tinsmith up`, and the listener that API processes share."""
