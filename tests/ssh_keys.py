"""SSH keys made for one test."""

from __future__ import annotations

from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

KINDS = ("ssh-ed25519", "ssh-rsa")


class SshKey(NamedTuple):
    """`public` as in an authorized_keys file, `private` as in a key file."""

    public: str
    private: bytes


def generate(kind: str, bits: int = 2048) -> SshKey:
    """`bits` is the size of an RSA key."""
    key = ed25519.Ed25519PrivateKey.generate() if kind == "ssh-ed25519" else rsa.generate_private_key(65537, bits)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return SshKey(f"{public} me@my-machine", private)
