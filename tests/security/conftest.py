"""The API in this process, as in tests/unit/app."""

from __future__ import annotations

from tests.unit.app.conftest import api, app, settings, state_url, stranger

__all__ = ["api", "app", "settings", "state_url", "stranger"]
