"""Recipients of encrypted exports in the age format (age-encryption.org)."""

from __future__ import annotations

from pyrage import RecipientError, ssh, x25519


def age_recipient(text: str) -> x25519.Recipient | ssh.Recipient:
    """Parses a public key: one of age (age1...), or one of SSH (ssh-ed25519 or ssh-rsa). Raises ValueError."""
    kind = ssh.Recipient if text.startswith("ssh-") else x25519.Recipient
    try:
        return kind.from_str(text)
    except RecipientError as error:
        raise ValueError(str(error)) from None
