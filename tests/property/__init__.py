"""Random runs against small models of the promises.

Only the backend's own tests load torch, so that a mutant dies fast.
"""
