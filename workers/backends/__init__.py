"""The backends that compute, behind one protocol for training and one for sampling."""
