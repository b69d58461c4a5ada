"""Hooks of mkdocs: pages of the repository outside docs/, links to its files, and nothing from another server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(https?:|//)[^>]*>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages at the root of the repository, and the files of it that a page links to."""
    for name in _PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    texts = [(Path(str(page.abs_src_path)), page.content_string) for page in files.documentation_pages()]
    targets = {target for source, text in texts for target in _targets(source, text)}
    for target in sorted(targets):
        uri = _uri(target)
        if target.is_file() and uri is not None and uri.startswith("files/"):
            files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page with links as the site has them; a link to a folder becomes its text."""
    source = Path(str(page.file.abs_src_path))

    def relink(found: re.Match[str]) -> str:
        label, path, anchor = found.groups(default="")
        uri = _uri((source.parent / path).resolve())
        if uri is None:
            return label
        return f"[{label}]({os.path.relpath(uri, Path(page.file.src_uri).parent)}{anchor})"

    return _LINK.sub(relink, markdown)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Raises PluginError for a page that loads something from another server."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another server: {found[0]}")
    return output


def _targets(source: Path, text: str) -> Iterator[Path]:
    for _, path, _ in _LINK.findall(text):
        yield (source.parent / path).resolve()


def _uri(target: Path) -> str | None:
    """The place of a file in the site; None for a folder. README.md is the site's first page."""
    if target.is_dir():
        return None
    if not target.is_relative_to(ROOT):
        raise PluginError(f"a link leads out of the repository: {target}")
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    if path == "README.md":
        return "index.md"
    return path if path in _PAGES else f"files/{path}"
