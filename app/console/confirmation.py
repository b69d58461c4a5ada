"""The question before a change that cannot be undone: a second press sends the form again."""

from __future__ import annotations

from flask import Response, render_template, request


def is_confirmed() -> bool:
    """True for a form that was sent with the second press."""
    return request.form.get("sure") == "yes"


def confirmation(title: str, *, of: object, effect: str, label: str, back: str) -> Response:
    """The page that asks for the second press. Its form sends the same fields again. `back`: the page of those who
    change nothing."""
    page = render_template("confirm.html", title=title, of=of, effect=effect, label=label, back=back)
    return Response(page, mimetype="text/html")
