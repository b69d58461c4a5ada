"""The pages of docs/: each is in the site, and that of the settings says what the code says."""

from __future__ import annotations

import re
from typing import Any

import yaml

from app.settings import Settings
from ops import settings_reference
from tests.unit.ops.compose import ROOT

DOCS = ROOT / "docs"


def test_the_page_of_settings_is_made_from_the_code():
    assert settings_reference.PATH.read_text() == settings_reference.text(), "run `make docs`"


def test_every_setting_has_a_row_with_a_description():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", settings_reference.text(), re.MULTILINE)
    schema = Settings.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    settings = [name for section in sections for name, found in section["properties"].items() if plain(found)]
    assert sorted(name for name, *_ in rows) == sorted(settings)
    assert [name for name, _, _, text in rows if not text.strip()] == []


def plain(found: dict[str, Any]) -> bool:
    """False for a section, and a list of sections."""
    return "$ref" not in str(found)


def test_the_site_shows_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {page for part in nav for page in ([part] if isinstance(part, str) else next(iter(part.values())))}
    assert {path.name for path in DOCS.glob("*.md")} <= listed
    assert {page for page in listed if not (DOCS / page).exists()} == {
        path.name for path in ROOT.glob("*.md") if path.name != "README.md"
    }
    decisions = (DOCS / "decisions" / "README.md").read_text()
    assert [path.name for path in (DOCS / "decisions").glob("0*.md") if f"({path.name})" not in decisions] == []


def test_the_first_page_links_to_every_page():
    links = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert links == {path.name for path in DOCS.glob("*.md") if path.name != "index.md"}


def test_what_is_inside_a_list_is_indented_by_four_as_python_markdown_needs():
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    lists = re.compile(r"^ {2,3}[-*] .*|(?<=\n\n) {5,7}\S.*", re.MULTILINE)
    texts = {page.name: re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages}
    assert [(name, found) for name, text in texts.items() for found in lists.findall(text)] == []


def wanted(address: str) -> str:
    """A pattern of the text that links to a source: it ends with the commit, thread or release that was read."""
    if commit := re.fullmatch(r"https://github\.com/[^/]+/[^/]+/blob/([0-9a-f]{7})[0-9a-f]{33}/.+", address):
        return rf".+, {commit[1]}"
    if thread := re.fullmatch(r"https://github\.com/[^/]+/[^/]+/(?:pull|issues)/([0-9]+)", address):
        return rf".+ {thread[1]}"
    if re.fullmatch(r"https://github\.com/[^/]+/[^/]+", address):
        return r".*wheel of [a-z-]+ [0-9]+\.[0-9]+\.[0-9]+"
    assert "github.com" not in address, f"{address} changes: name a commit"
    return r".+"


def test_each_fact_about_another_system_has_a_source_that_names_the_version_read():
    page = (DOCS / "compare.md").read_text()
    targets = dict(re.findall(r"^\[([a-z0-9-]+)\]: (.+)$", page, re.MULTILINE))
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+) \|$", page, re.MULTILINE)
    sources = [source for system, source in rows if system not in ("System", "Tinsmith")]
    links = [re.findall(r"\[([^]]+)\]\[([^]]+)\]", source) for source in sources]
    assert links and all(links)
    assert {name for row in links for _, name in row} == targets.keys()
    for text, name in (link for row in links for link in row):
        assert re.fullmatch(wanted(targets[name]), text), f"[{text}][{name}]"
