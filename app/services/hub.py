"""Serves base models' tokenizers and image processors as Hugging Face Hub repositories, for clients without access to
the Hub.

These requests need no key, since Hub clients have none of ours. So only the files named in app/domain/records.py are
served, and no path is built from the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from app import ids
from app.errors import BadRequest, EntryNotFound, RepoNotFound, RevisionNotFound
from app.services.base_models import BaseModels
from app.settings import Settings
from app.stores.hub_cache import FILES, TEMPLATES, HubCache

_BRANCH = "main"
# SDK and cookbook load this tokenizer for every model of the family, because Meta's own repositories require accepting
# a licence.
_LLAMA_3, _OPEN_LLAMA_3 = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file; `oid` is the git object id of its content."""

    path: Path
    size: int
    oid: str


@dataclass(frozen=True, slots=True)
class Repository:
    """A model's files by name; `commit` changes when any file changes."""

    id: str
    commit: str
    files: Mapping[str, HubFile]

    def file(self, name: str) -> HubFile:
        """The file with this name. Raises EntryNotFound."""
        if name not in self.files:
            raise EntryNotFound(f"{self.id} has no file {name[:200]!r} here: only its tokenizer is served")
        return self.files[name]

    def below(self, folder: str) -> dict[str, HubFile]:
        """The files in a folder and its subfolders; an empty folder name means all files. Raises EntryNotFound when
        there are none."""
        found = {name: file for name, file in self.files.items() if not folder or name.startswith(f"{folder}/")}
        if not found:
            raise EntryNotFound(f"{self.id} has no folder {folder[:200]!r} here: only its tokenizer is served")
        return found


class HubService:
    """Serves tokenizer repositories. Files may change while the server runs: every request checks them, and changed
    files are read again."""

    def __init__(self, settings: Settings, bases: BaseModels, cache: HubCache) -> None:
        served = settings.api.tokenizers != "local"
        self._sources = _sources(bases) if served else {}
        self._cache = cache

    def repository(self, repo_id: str, revision: str) -> Repository:
        """The repository with this id. Raises RepoNotFound, RevisionNotFound, or Unavailable when the files cannot be
        fetched from the Hub now."""
        source = self._sources.get(repo_id)
        if source is None:
            raise RepoNotFound(f"no tokenizer of {repo_id[:200]!r} is served here; the names of base models are served")
        try:
            files = _files(self._cache.folder(source))
        except BadRequest as error:
            raise RepoNotFound(str(error)) from None
        if not files:
            raise RepoNotFound(
                f"the API cannot read the tokenizer of {repo_id}; put its files into a folder that the API can read "
                "(setting base_models.tokenizer)"
            )
        commit = _commit(files)
        if revision not in (_BRANCH, commit):
            raise RevisionNotFound(
                f"{repo_id} is served here only as revision {_BRANCH} or {commit}, not as {revision[:200]!r}"
            )
        return Repository(repo_id, commit, files)


def _sources(bases: BaseModels) -> dict[str, str]:
    """Tokenizer sources by every id that a client may request. A base model's full name takes precedence over a
    shortened hub id."""
    sources = {name: bases.tokenizer(name) for name in bases.names()}
    served = dict(sources)
    for name, source in sources.items():
        served.setdefault(ids.hub_id(name), source)
        if name.startswith(_LLAMA_3):
            served.setdefault(_OPEN_LLAMA_3, source)
        if not Path(source).is_dir():
            served.setdefault(source, source)
    return served


def _files(folder: Path) -> dict[str, HubFile]:
    paths = [*(folder / name for name in FILES), *sorted(folder.glob(TEMPLATES))]
    return {path.relative_to(folder).as_posix(): _file(path) for path in paths if path.is_file()}


def _file(path: Path) -> HubFile:
    status = path.stat()
    return HubFile(path, status.st_size, _oid(path, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=256)
def _oid(path: Path, size: int, _changed_ns: int) -> str:
    return hashlib.sha1(b"blob %d\0" % size + path.read_bytes(), usedforsecurity=False).hexdigest()


def _commit(files: Mapping[str, HubFile]) -> str:
    lines = "".join(f"{file.oid} {name}\n" for name, file in sorted(files.items()))
    return hashlib.sha1(lines.encode(), usedforsecurity=False).hexdigest()
