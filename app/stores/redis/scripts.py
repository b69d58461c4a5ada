"""The texts of the Lua scripts, made from lua/*.lua: the scripts, one a state transition, and the parts they share.

Each file holds one domain, as sections of two kinds:

    -- part: doom
    -- What the part does. Its local functions are code that scripts share.
    local function doom(model, seq, reason) ... end

    -- script: commit flags=allow-oom
    -- needs: doom, now_ms
    -- What the transition does, its ARGV and its reply.
    local model, seq = ARGV[1], ARGV[3]

Redis is sent each script as a text of its own, and caches it by hash: the parts that the script needs, the parts that
those need, and the section. `needs` may name a part of any file, and `settings`, the values in `_settings`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from app.settings import EngineSettings

# A smaller payload is not worth a separate object.
_SPILL_LEAST = 4096
_SETTINGS = "settings"
_HEADING = re.compile(r"-- (?P<kind>script|part): (?P<name>\w+)(?: flags=(?P<flags>[a-z]+(?:[-,][a-z]+)*))?\n")
_NEEDS = re.compile(r"-- needs: (\w+(?:, \w+)*)\n")
_LIKE_A_HEADING = re.compile(r"--\s*(?:scripts?|parts?|needs)\s*:", re.IGNORECASE)


def packaged(settings: EngineSettings) -> dict[str, str]:
    """The text of each packaged script, by name."""
    return _packaged().texts(_settings(settings))


@cache
def alone(name: str) -> str:
    """The text of a packaged script that needs no settings."""
    return packaged(EngineSettings())[name]


@dataclass(frozen=True, slots=True)
class Section:
    """A script or a part: its lines behind the heading, and the names of the parts that they use."""

    flags: str
    needs: tuple[str, ...]
    text: str


class Library:
    """The sections of files of Lua, by the files' names.

    Raises ValueError for a file that is not made of sections, a name that two sections of a kind have, a part that is
    needed and not there, and parts that need each other.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.scripts: dict[str, Section] = {}
        self.parts: dict[str, Section] = {_SETTINGS: Section("", (), "")}
        for file, text in sources.items():
            self._read(file, text)
        for name, part in self.parts.items():
            self._ordered(name, part, (name,))
        self._behind = {name: self._ordered(name, section) for name, section in self.scripts.items()}

    def texts(self, settings: str) -> dict[str, str]:
        """The text of each script, by name, with `settings` as the part of that name."""
        parts = {name: part.text for name, part in self.parts.items()} | {_SETTINGS: settings}
        return {
            name: f"{_shebang(script)}{''.join(parts[part] for part in self._behind[name])}{script.text}"
            for name, script in self.scripts.items()
        }

    def _read(self, file: str, text: str) -> None:
        preface, *sections = re.split(r"^(?=-- (?:script|part): )", text, flags=re.MULTILINE)
        _refuse_headings(file, preface)
        if any(line and not line.startswith("--") for line in preface.splitlines()):
            raise ValueError(f"{file}: code in front of the first section")
        for section in sections:
            heading = _HEADING.match(section)
            if heading is None or (heading["kind"] == "part" and heading["flags"]):
                raise ValueError(f"{file}: not a heading: {section.splitlines()[0]!r}")
            needs = _NEEDS.match(section, heading.end())
            body = section[needs.end() if needs else heading.end() :].strip("\n") + "\n"
            _refuse_headings(file, body)
            known = self.scripts if heading["kind"] == "script" else self.parts
            if heading["name"] in known:
                raise ValueError(f"{file}: there is a {heading['kind']} {heading['name']!r} already")
            wanted = tuple(needs[1].split(", ")) if needs else ()
            known[heading["name"]] = Section(heading["flags"] or "", wanted, body)

    def _ordered(self, name: str, section: Section, above: tuple[str, ...] = ()) -> list[str]:
        """The names of all parts behind a section, each behind those that it needs itself."""
        found: list[str] = []
        for need in section.needs:
            if need in above:
                raise ValueError(f"part {need!r} needs itself: {' > '.join((*above, need))}")
            if need not in self.parts:
                raise ValueError(f"{name!r} needs {need!r}, and there is no such part")
            found += [*self._ordered(need, self.parts[need], (*above, need)), need]
        return list(dict.fromkeys(found))


def _refuse_headings(file: str, text: str) -> None:
    """A misspelt heading would be a comment, and its section part of the one before."""
    for line in text.splitlines():
        if _LIKE_A_HEADING.match(line):
            raise ValueError(f"{file}: not a heading: {line!r}")


@cache
def _packaged() -> Library:
    folder = files(__package__) / "lua"
    return Library({item.name: item.read_text() for item in folder.iterdir() if item.name.endswith(".lua")})


def _settings(settings: EngineSettings) -> str:
    values = {
        "payload_budget": settings.payload_budget_bytes,
        "memory_share": settings.memory_share,
        "spill_at_once": settings.spill_bytes,
        "spill_least": _SPILL_LEAST,
        "result_spill": settings.result_spill_bytes,
        "result_budget": settings.result_budget_bytes,
    }
    return f"local SETTINGS = {{{', '.join(f'{name} = {value}' for name, value in values.items())}}}\n"


def _shebang(script: Section) -> str:
    return f"#!lua flags={script.flags}\n" if script.flags else ""
