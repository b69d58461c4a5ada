"""Converts the Tinker wire format to Tinsmith's types and back. Imports neither Flask nor any GPU library."""
