"""Training backends behind one protocol (base.py): plain torch, and DeepSpeed ZeRO."""
