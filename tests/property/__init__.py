"""Random runs against small models of what must hold.

Only the backend's own tests load torch, so that a mutant dies fast.
"""
