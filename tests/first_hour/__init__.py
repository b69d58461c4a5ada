"""The first things a new user does, each run whole and judged."""
