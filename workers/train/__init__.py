"""Training Ops: in order, owned, fenced, and shared out fairly."""
