"""Fields of protobuf messages as bytes, for bodies that no library would write."""

from __future__ import annotations


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, a text or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A whole number from 0."""
    low, more = value & 127, value >> 7
    return bytes([low | 128]) + varint(more) if more else bytes([low])


def with_tensor(content: bytes) -> bytes:
    """A ForwardBackwardRequest of one datum with one input, a Tensor of this content."""
    return field(3, field(2, field(1, b"weights") + field(2, content)))
