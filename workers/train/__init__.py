"""Training Ops: run in order by the model's owner, fenced, and scheduled fairly."""
