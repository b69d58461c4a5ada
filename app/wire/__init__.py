"""Bytes of the Tinker wire format to Tinsmith's types and back; imports neither Flask nor any GPU library."""
