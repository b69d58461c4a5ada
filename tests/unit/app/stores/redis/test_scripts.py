"""The files of Lua: a script is sent with the parts that it needs and no other, and a broken file is refused."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
import redis

import app.stores.redis
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import Scripts
from app.stores.redis.scripts import Library

_FOLDER = files(app.stores.redis)
_LIBRARY = Library({item.name: item.read_text() for item in (_FOLDER / "lua").iterdir()})
_SECTIONS = {f"script {name}": section for name, section in _LIBRARY.scripts.items()} | {
    f"part {name}": section for name, section in _LIBRARY.parts.items()
}
_TEXTS = _LIBRARY.texts("local SETTINGS = {}\n")

_KEYWORDS = "and break do else elseif end false for function if in local nil not or repeat return then true until while"
_OF_REDIS = "ARGV cjson ipairs math pairs pcall redis string table tonumber tostring type unpack"
_KNOWN = {*_KEYWORDS.split(), *_OF_REDIS.split()}
_NOT_CODE = re.compile(r"--[^\n]*|'(?:\\.|[^'\\])*'")
_TABLE_KEY = re.compile(r"(?<=[{,])(\s*)\w+ =(?!=)")
_NAME = re.compile(r"(?<![.:\w])[A-Za-z_]\w*")
_DECLARED = re.compile(r"\blocal (?!function)([\w, ]+)|\bfor ([\w, ]+) (?:in|=)|\bfunction ?(\w*)\(([\w, ]*)\)")
_TOP_LEVEL = re.compile(r"^local (?:function (\w+)|([\w, ]+))", re.MULTILINE)


def declared(code: str) -> set[str]:
    return {name for groups in _DECLARED.findall(code) for group in groups for name in _NAME.findall(group)}


def undeclared(text: str) -> set[str]:
    """The names that a section uses from outside."""
    code = _NOT_CODE.sub("''", text)
    return set(_NAME.findall(_TABLE_KEY.sub(r"\1", code))) - declared(code) - _KNOWN


def provided(part: str) -> set[str]:
    """The names that a part has for others."""
    if part == "settings":
        return {"SETTINGS"}
    found = _TOP_LEVEL.findall(_LIBRARY.parts[part].text)
    return {name for groups in found for group in groups for name in _NAME.findall(group)}


def behind(*sections: str) -> str:
    return Library({"some.lua": "\n".join(sections)}).texts("local SETTINGS = 1\n")["x"]


def test_a_script_is_sent_with_the_parts_that_it_needs_in_order_and_no_other():
    a, b = "-- part: a\nlocal a = 1\n", "-- part: b\n-- needs: a\nlocal b = a\n"
    c = "-- part: c\n-- needs: a\nlocal c = a\n"
    script = "-- script: x flags=allow-oom,no-writes\n-- needs: c, b\n-- Adds.\nreturn b + c\n"
    expected = "#!lua flags=allow-oom,no-writes\nlocal a = 1\nlocal c = a\nlocal b = a\n-- Adds.\nreturn b + c\n"
    assert behind(script, c, b, a, "-- part: other\nlocal d = 4\n") == expected


def test_a_script_without_flags_and_needs_is_sent_as_it_is():
    assert behind("-- About the file.\n", "-- script: x\n-- Answers.\nreturn 1\n", "-- part: a\nlocal a = 1") == (
        "-- Answers.\nreturn 1\n"
    )


def test_the_settings_are_sent_only_to_a_script_that_needs_them():
    assert behind("-- script: x\n-- needs: settings\nreturn SETTINGS\n") == "local SETTINGS = 1\nreturn SETTINGS\n"
    assert "SETTINGS" not in behind("-- script: x\nreturn 1\n")


@pytest.mark.parametrize(
    ("lua", "why"),
    [
        ("-- script: x\nreturn 1\n-- script: x\nreturn 2\n", "there is a script 'x' already"),
        ("-- part: x\nlocal x\n-- part: x\nlocal x\n", "there is a part 'x' already"),
        ("-- part: settings\nlocal SETTINGS\n", "there is a part 'settings' already"),
        ("-- script: x\n-- needs: gone\nreturn 1\n", "'x' needs 'gone', and there is no such part"),
        ("-- script: y\nreturn 1\n-- script: x\n-- needs: y\nreturn 1\n", "there is no such part"),
        ("-- part: a\n-- needs: gone\nlocal a\n-- script: x\n-- needs: a\nreturn 1\n", "'a' needs 'gone'"),
        (
            "-- part: a\n-- needs: b\nlocal a\n-- part: b\n-- needs: a\nlocal b\n-- script: x\n-- needs: a\nreturn 1\n",
            "part 'a' needs itself: a > b > a",
        ),
        ("-- part: a\n-- needs: gone\nlocal a\n", "'a' needs 'gone'"),
        ("return 1\n-- script: x\nreturn 1\n", "code in front of the first section"),
        ("-- scripts: x\nreturn 1\n", "not a heading: '-- scripts: x'"),
        ("-- script: y\nreturn 1\n-- Script: x\nreturn 1\n", "not a heading: '-- Script: x'"),
        ("-- script: x, allow-oom\nreturn 1\n", "not a heading: '-- script: x, allow-oom'"),
        ("-- script: \nreturn 1\n", "not a heading"),
        ("-- part: a flags=allow-oom\nlocal a\n", "not a heading"),
        ("-- script: x\n-- Comment.\n-- needs: settings\nreturn 1\n", "not a heading: '-- needs: settings'"),
        ("-- script: x\n-- needs: settings pages\nreturn 1\n", "not a heading"),
    ],
)
def test_a_broken_file_is_refused(lua: str, why: str):
    with pytest.raises(ValueError, match=re.escape(why)):
        Library({"some.lua": lua})


def test_a_name_is_used_once_in_all_files():
    with pytest.raises(ValueError, match=r"b.lua: there is a script 'x' already"):
        Library({"a.lua": "-- script: x\nreturn 1\n", "b.lua": "-- script: x\nreturn 2\n"})


@pytest.mark.parametrize("name", _SECTIONS)
def test_a_section_names_the_parts_that_it_uses_and_no_other(name: str):
    section = _SECTIONS[name]
    from_outside = undeclared(section.text)
    of_needs = {need: provided(need) for need in section.needs}
    assert from_outside <= set().union(*of_needs.values()), (
        f"{name} uses names that are of no part that it needs: name the part in its line `-- needs:`"
    )
    used = {need for need, names in of_needs.items() if names & from_outside}
    assert used == set(section.needs), f"{name} needs parts that it does not use"
    assert list(section.needs) == sorted(used), f"{name} needs its parts in alphabetical order"


def test_every_part_is_needed():
    assert {need for section in _SECTIONS.values() for need in section.needs} == set(_LIBRARY.parts)


def test_every_script_is_called_and_every_called_script_is_there():
    modules = [Path(str(item)).read_text() for item in _FOLDER.iterdir() if item.name.endswith(".py")]
    called = re.findall(r"(?:self\._run(?:\.each|\.by_prefix)?|scripts\.alone)\(\s*\"(\w+)\"", "\n".join(modules))
    rule = 'call each script in app/stores/redis/*.py as self._run("name", ...), or its text: scripts.alone("name")'
    assert set(called) == set(_LIBRARY.scripts), rule


@pytest.mark.parametrize("name", _LIBRARY.scripts)
def test_a_script_begins_with_its_input_and_its_reply(name: str):
    text = _LIBRARY.scripts[name].text
    head = text[: re.search(r"^(?!--)", text, re.MULTILINE).start()]
    takes_input = "ARGV" in _NOT_CODE.sub("", text)
    assert ("ARGV" in head) == takes_input, "describe its ARGV, if it has any, in the comment below the heading"
    assert re.search(r"\b[Rr]eturns\b", head), 'say "Returns ..." in the comment below the heading'


def test_every_key_of_a_script_is_in_the_list_of_keys():
    found = {key for section in _SECTIONS.values() for key in re.findall(r"'tinsmith:(\w+)", section.text)}
    assert {key for key in found if not re.search(rf"\b{key}\b", keys.__doc__ or "")} == set(), (
        "describe the key in the docstring of app/stores/redis/keys.py"
    )


def test_every_script_is_taken_by_the_server(client: redis.Redis):
    for text in _TEXTS.values():
        client.script_load(text)


def test_a_process_sends_these_texts(client: redis.Redis):
    Scripts(client, EngineSettings())("heartbeat", "session")
    assert client.script_exists(client.register_script(_TEXTS["heartbeat"]).sha) == [True]
