"""Tinsmith's API and domain. Imports neither workers nor any GPU library."""
