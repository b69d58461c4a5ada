"""`python -m workers.flower [OPTIONS]`: starts Flower. `celery -A` would import modules of the current folder first."""

from __future__ import annotations

import sys

from workers.celery_app import app

if __name__ == "__main__":
    sys.exit(app.start(["flower", *sys.argv[1:]]))
