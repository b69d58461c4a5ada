"""How handling a doorbell can end other than with a result."""

from __future__ import annotations

from app.errors import TinsmithError


class NotNow(TinsmithError):
    """The future is not terminal yet, and something else will ring for it again."""
