"""What the API does, without HTTP: checks, admission, waiting. Imports no Flask."""
