"""Imports of weights that were made elsewhere: uploads, the checks of their files, and their checkpoints."""
