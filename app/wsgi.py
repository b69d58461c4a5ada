"""The application, as a WSGI server loads it: `python -m gunicorn -c python:app.gunicorn_conf app.wsgi:application`."""

from __future__ import annotations

from app import create_app
from app.api.base import EXTENSION
from app.services import admission
from app.settings import from_environment
from app.stores.disk import Disk
from app.stores.objects import folder_of
from app.telemetry import configure_logging

configure_logging()
_settings = from_environment()
application = create_app(_settings)
_oplog = application.extensions[EXTENSION].oplog
_folders = {"data_dir": _settings.data_dir, "the object store": folder_of(_settings)}
_disks = [
    Disk(name, folder, _settings.engine.free_disk_bytes)
    for name, folder in _folders.items()
    if folder and folder.is_dir()
]
admission.beat_for_ever(_oplog)
admission.watch_for_ever(_oplog, _disks)
