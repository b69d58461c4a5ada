"""Frozen contracts: what is stored, sent and configured today is read by tomorrow's code, and the other way round.

`ecb7b39/` holds them as the code of that commit made them. `python -m tests.golden FOLDER` writes what the present code
makes; the tests compare the two. What was added since is listed in added.py, and nothing else may differ.
"""
