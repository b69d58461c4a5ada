"""A page that lists the operations of /openapi.json: no script, nothing fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from flask import Response, current_app
from flask_smorest import Api

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Tinsmith API</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
td{{padding:.2rem 1rem .2rem 0;vertical-align:top}}code{{font-size:.95em}}</style>
<h1>Tinsmith API</h1><p>Schemas: <a href="openapi.json">openapi.json</a>. Send your key in <code>X-API-Key</code>.</p>
<table>{rows}</table></html>"""


def register(api: Api) -> None:
    """Serve the page at /docs."""

    def docs() -> Response:
        return Response(_PAGE.format(rows="".join(_rows(api.spec.to_dict()))), mimetype="text/html")

    current_app.add_url_rule("/docs", "docs", docs)


def _rows(spec: dict[str, Any]) -> Iterator[str]:
    for path, operations in sorted(spec["paths"].items()):
        for method, operation in operations.items():
            if isinstance(operation, dict):
                summary = escape(operation.get("summary", ""))
                yield f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{summary}"
