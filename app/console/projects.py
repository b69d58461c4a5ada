"""The console's pages for admins: projects with their members, keys and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import inf
from typing import Any, cast

from flask import Blueprint, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from app.api.base import current_caller, needs, services
from app.console.confirmation import confirmation, is_confirmed
from app.domain.accounts import ROLES, SCOPES, Role, Scope
from app.domain.limits import COUNTS, NAMES
from app.errors import BadRequest

_DAY_S = 86_400
_KEY_DAYS = range(1, 3651)
_NONE = "none"
"""The text for no role, and for no limit."""
Value = float | None


def add(blueprint: Blueprint) -> None:
    """Adds the pages and their forms to the console."""
    blueprint.add_url_rule("/projects", "projects", _list)
    blueprint.add_url_rule("/projects/<project>", "project", _show)
    forms: dict[str, Callable[..., Any]] = {
        "/organisations": _add_organisation,
        "/projects": _add_project,
        "/projects/<project>/members": _add_member,
        "/projects/<project>/role": _set_role,
        "/projects/<project>/keys": _add_key,
        "/projects/<project>/keys/revoke": _revoke,
        "/projects/<project>/limits": _set_limits,
    }
    for rule, form in forms.items():
        blueprint.add_url_rule(rule, form.__name__.strip("_"), needs("manage")(form), methods=["POST"])


def _list() -> str:
    """The projects that the user administers."""
    caller, of = current_caller(), services().administration
    organisations = {one.id: one.name for one in of.organisations(caller)}
    return render_template(
        "projects.html", projects=of.projects(caller), organisations=organisations, is_operator=caller.is_operator
    )


def _show(project: str) -> str:
    """One project: its members, its keys and its limits. Raises NotFound and Forbidden."""
    found = services().administration.describe(current_caller(), project)
    settings = asdict(services().settings.limits.project)
    own = {name: _NONE if value is None else str(value) for name, value in found.project.limits.items()}
    return render_template(
        "project.html",
        found=found,
        limits=[(name, own.get(name, ""), settings[name]) for name in NAMES],
        roles=ROLES,
        scopes=sorted(current_caller().scopes),
        now=services().records.now(),
    )


def _add_organisation() -> Response:
    services().administration.add_organisation(current_caller(), _text("name"))
    return redirect(url_for("console.projects"))


def _add_project() -> Response:
    return _back(services().administration.add_project(current_caller(), _text("organisation"), _text("name")).id)


def _add_member(project: str) -> Response:
    services().administration.add_member(current_caller(), project, _text("email"), _role(_text("role")))
    return _back(project)


def _set_role(project: str) -> Response:
    """Changes the role of a member, or removes the member."""
    role = _text("role")
    services().administration.set_role(current_caller(), project, _text("user"), None if role == _NONE else _role(role))
    return _back(project)


def _add_key(project: str) -> str:
    """The page with the new key. It is shown once, and stored nowhere but in this answer."""
    scopes = request.form.getlist("scope")
    if unknown := set(scopes) - SCOPES:
        raise BadRequest(f"{min(unknown)[:80]!r} is no scope: give some of {', '.join(sorted(SCOPES))}")
    days = _text("days")
    lifetime_s = _key_days(days) * _DAY_S if days else None
    key, text = services().administration.add_key(
        current_caller(), project, _text("user"), cast("list[Scope]", scopes), _text("name"), lifetime_s
    )
    return render_template("new_key.html", project=project, key=key, text=text)


def _revoke(project: str) -> Response:
    """Revokes a key, once the user has confirmed it with a second press."""
    administration, id_ = services().administration, _text("key")
    if not is_confirmed():
        key = administration.key(current_caller(), project, id_)
        return confirmation(
            "Revoke this key",
            of=f"{key.id} {key.name}",
            effect="It stops working at once, and cannot work again.",
            label="Revoke",
            back=_url(project),
        )
    administration.revoke(current_caller(), project, id_)
    return _back(project)


def _set_limits(project: str) -> Response:
    """Sets the limits that the user changed: those that differ from the ones that the page showed, and from those
    before. A smaller number of kept checkpoints deletes some, so it asks for a second press."""
    found = services().administration.describe(current_caller(), project)
    own = found.project.limits
    texts = {name: _text(name) for name in NAMES if name in request.form}
    given = {name: text for name, text in texts.items() if text != request.form.get(f"shown_{name}")}
    limits = {name: _limit(name, text) for name, text in given.items() if text}
    changed = {name: value for name, value in limits.items() if name not in own or own[name] != value}
    default = {name for name, text in given.items() if not text and name in own}
    if not changed and not default:
        return _back(project)
    if not is_confirmed() and (fewer := _fewer_kept(own, changed, default)) is not None:
        return confirmation(
            "Delete old checkpoints",
            of=project,
            effect=f"Each run keeps its {fewer} newest checkpoints of each kind. "
            "Older ones are deleted within a minute or so.",
            label="Set the limits",
            back=_url(project),
        )
    services().administration.set_limits(current_caller(), project, changed, default)
    return _back(project)


def _fewer_kept(own: Mapping[str, Value], changed: Mapping[str, Value], default: set[str]) -> int | None:
    """The new number of checkpoints that a run keeps, if it is smaller than before. None for a wrong number, which is
    refused without a question."""
    name, settings = "keep_checkpoints", services().settings.limits.project.keep_checkpoints
    before = own.get(name, settings)
    after = settings if name in default else changed.get(name, before)
    return int(after) if after is not None and 0 < after < (inf if before is None else before) else None


def _key_days(text: str) -> int:
    is_short = text.isdecimal() and len(text) <= len(str(_KEY_DAYS[-1]))
    if not is_short or int(text) not in _KEY_DAYS:
        raise BadRequest(
            f"{text[:80]!r} is no number of days: give {_KEY_DAYS[0]} to {_KEY_DAYS[-1]}, or nothing for a lasting key"
        )
    return int(text)


def _limit(name: str, text: str) -> Value:
    if text == _NONE:
        return None
    try:
        return int(text) if name in COUNTS else float(text)
    except ValueError:
        kind = "whole number" if name in COUNTS else "number"
        raise BadRequest(f"{name} is {text[:80]!r}: give a {kind}, {_NONE}, or nothing") from None


def _role(text: str) -> Role:
    if text not in ROLES:
        raise BadRequest(f"{text[:80]!r} is no role: give one of {', '.join(ROLES)}")
    return text


def _text(name: str) -> str:
    return request.form.get(name, "").strip()


def _url(project: str) -> str:
    return url_for("console.project", project=project)


def _back(project: str) -> Response:
    return redirect(_url(project))
