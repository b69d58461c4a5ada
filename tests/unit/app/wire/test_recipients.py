from __future__ import annotations

import pyrage
import pytest

from app.wire.recipients import age_recipient
from tests import ssh_keys

_SSH = ssh_keys.generate("ssh-ed25519").public
_AGE = str(pyrage.x25519.Identity.generate().to_public())
_GOOD = {"age": _AGE, "ed25519": _SSH, "RSA": ssh_keys.generate("ssh-rsa", bits=4096).public}
_BAD = {
    "nothing": ("", None),
    "no age key": ("age1x", None),
    "two age keys": (f"{_AGE}\n{_AGE}", None),
    "no ssh key": ("ssh-rsa x", None),
    "a number without digits, at which pyrage panics": ("ssh-rsa AAAAB3NzaC1yc2EAAAABAA==", None),
    "two ssh keys, of which pyrage takes the first": (f"{_SSH}\n{_SSH}", "give each key as one text"),
    "a short key": (ssh_keys.generate("ssh-rsa", bits=1024).public, "RSA with 2,048 to 4,096 bits"),
    "options before the key": (f"no-pty {_SSH}", None),
}


@pytest.mark.parametrize("case", _GOOD)
def test_a_public_key_is_a_recipient(case: str) -> None:
    assert pyrage.encrypt(b"weights", [age_recipient(_GOOD[case])])


@pytest.mark.parametrize("case", _BAD)
def test_any_other_text_is_refused(case: str) -> None:
    text, why = _BAD[case]
    with pytest.raises(ValueError, match=why):
        age_recipient(text)
