"""Frozen contracts: today's stored data, messages and settings are read by tomorrow's code, and the other way round.

`ecb7b39/` holds them as the code of that commit made them. `python -m tests.golden FOLDER` writes the present code's
contracts; the tests compare the two. Later additions are listed in added.py, and nothing else may differ.
"""
