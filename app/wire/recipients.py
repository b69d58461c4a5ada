"""Recipients of encrypted exports in the age format (age-encryption.org)."""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pyrage import RecipientError, ssh, x25519

_RSA_BITS = range(2048, 4097)


def age_recipient(text: str) -> x25519.Recipient | ssh.Recipient:
    """Parses one public key: of age (age1...), or of SSH (ssh-ed25519, or ssh-rsa of 2,048 to 4,096 bits). Raises
    ValueError."""
    try:
        if not text.startswith("ssh-"):
            return x25519.Recipient.from_str(text)
        _check_ssh(text)
        return ssh.Recipient.from_str(text)
    except (RecipientError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from None


def _check_ssh(text: str) -> None:
    """Raises ValueError or UnsupportedAlgorithm for what pyrage refuses otherwise: by a panic, or not before it
    encrypts. pyrage takes the first of several lines."""
    if len(text.splitlines()) > 1:
        raise ValueError("give each key as one text")
    key = load_ssh_public_key(text.encode())
    if not isinstance(key, Ed25519PublicKey) and not (isinstance(key, RSAPublicKey) and key.key_size in _RSA_BITS):
        raise ValueError("an SSH key must be of ed25519, or of RSA with 2,048 to 4,096 bits")
