"""`python -m app.server -c python:app.gunicorn_conf app.wsgi:application`: gunicorn without the current folder on the
import path.
"""

from __future__ import annotations

from gunicorn.app.wsgiapp import WSGIApplication


class _Server(WSGIApplication):  # type: ignore[misc]
    def chdir(self) -> None:
        """Leaves the import path as it is. gunicorn puts the current folder first on it before it loads its settings,
        so an `app.py` of the user would be loaded in the place of our package."""


if __name__ == "__main__":
    _Server(prog="gunicorn").run()
