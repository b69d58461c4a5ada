"""Every guard, taken out once: a test must fail. One that nothing misses is no guard, or has no test."""
