"""Signed URLs of this API. A signed URL needs no key: anyone who has it may use it until it expires."""

from __future__ import annotations

import hashlib
import hmac
import time
from urllib.parse import quote

from app.errors import Forbidden, NotFound


class UrlSigner:
    """Signs paths below /api/v1. Every process of one installation has the same secret."""

    def __init__(self, secret: str, public_url: str) -> None:
        self._secret = secret.encode()
        self._public_url = public_url.rstrip("/")

    def url(self, path: str, expires: int) -> str:
        """The signed URL of `path` (such as `objects/a/b`), valid until `expires` in unix seconds.

        Raises NotFound when the settings hold no url_secret.
        """
        if not self._secret:
            raise NotFound(
                "this server creates no signed URLs: its operator has to set url_secret in the config file, to 32 "
                "random characters or more"
            )
        query = f"expires={expires}&signature={self._sign(path, expires)}"
        return f"{self._public_url}/api/v1/{quote(path)}?{query}"

    def check(self, path: str, expires: int, signature: str) -> None:
        """Raises Forbidden for a signature that `url` did not make, and for one that has expired."""
        expected = self._sign(path, expires).encode()
        if not self._secret or not hmac.compare_digest(expected, signature.encode()):
            raise Forbidden("this signed URL was not made by this server: its signature does not match")
        if time.time() >= expires:
            raise Forbidden("this signed URL has expired: ask for a new one")

    def _sign(self, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{path}\n{expires}".encode(), hashlib.sha256).hexdigest()
