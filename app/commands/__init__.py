"""The commands beside `tinsmith up`, one module each. They work on a stack from outside."""
