"""The process table: the processes that `tinsmith up` starts once the state server answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from app.settings import SETTINGS_VARIABLE, Settings
from app.stack.child import Command

_WORKERS = {
    "trainer": ("workers.trainer",),
    "full-trainer": ("workers.trainer", "--full"),
    "sampler": ("workers.sampler",),
    "full-sampler": ("workers.sampler", "--full"),
}


def table(settings: Settings, settings_file: Path) -> Iterator[Command]:
    """The commands of all processes. Node names are numbered across all base models, so each name is unique on this
    machine."""
    yield _python("api", settings_file, "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application")
    for role, (module, *options) in _WORKERS.items():
        for index, base in enumerate(_bases(settings, role)):
            node = f"{role}-{index}"
            yield _python(node, settings_file, module, "--base", base, "--name", node, *options)


def _bases(settings: Settings, role: str) -> Iterator[str]:
    for base in settings.base_models:
        sections = {
            "trainer": base.trainer,
            "full-trainer": base.full,
            "sampler": base.sampler,
            "full-sampler": base.full_sampler,
        }
        section = sections[role]
        yield from [base.name] * (section.count if section else 0)


def _python(name: str, settings_file: Path, *arguments: str) -> Command:
    return Command(name, (sys.executable, "-m", *arguments), {SETTINGS_VARIABLE: str(settings_file)})
