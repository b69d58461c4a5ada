"""The HTTP server of `tinsmith up`: gunicorn, with modules of the installation alone."""
