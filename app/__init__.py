"""Tinsmith's API and domain. Imports neither workers nor any GPU library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flask import Flask

    from app.settings import Settings


def create_app(settings: Settings) -> Flask:
    """Builds the WSGI application. Flask is imported here, so that workers can use app.domain without it.

    Raises SetupError when the settings cannot work.
    """
    from app.web import build

    return build(settings)
