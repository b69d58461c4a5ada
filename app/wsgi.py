"""The application, as a WSGI server loads it: `python -m gunicorn -c python:app.gunicorn_conf app.wsgi:application`."""

from __future__ import annotations

from app import create_app
from app.api.base import EXTENSION
from app.services import admission
from app.settings import from_environment
from app.telemetry import configure_logging

configure_logging()
application = create_app(from_environment())
admission.beat_for_ever(application.extensions[EXTENSION].oplog)
