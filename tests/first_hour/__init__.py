"""First steps of a new user, each run completely and checked."""
