"""Serves base models' tokenizers and image processors as Hugging Face Hub repositories, for clients without access to
the Hub.

These requests need no key, since Hub clients have none of ours. So only the files named in app/domain/records.py are
served, and no path is built from the request.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from app import ids
from app.domain.records import CONFIG_FILE, PROCESSOR_FILES, TEMPLATE_FOLDER, TOKENIZER_FILES
from app.errors import EntryNotFound, RepoNotFound, RevisionNotFound, Unavailable
from app.services.base_models import BaseModels
from app.settings import Settings

_BRANCH = "main"
_FILES = (CONFIG_FILE, *TOKENIZER_FILES, *PROCESSOR_FILES)
_TEMPLATES = f"{TEMPLATE_FOLDER}/*.jinja"
# SDK and cookbook load this tokenizer for every model of the family, because Meta's own repositories require accepting
# a licence.
_LLAMA_3, _OPEN_LLAMA_3 = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
_TRY_AGAIN_S = 60.0
_PATIENCE_S = 5.0


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

    def __init__(self, settings: Settings, bases: BaseModels) -> None:
        served = settings.api.tokenizers != "local"
        self._sources = _sources(bases) if served else {}
        self._fetched: dict[str, Path] = {}
        self._failed: dict[str, float] = {}
        self._lock = threading.Lock()

    def repository(self, repo_id: str, revision: str = _BRANCH) -> Repository:
        """The repository with this id. Raises RepoNotFound, RevisionNotFound, or Unavailable when the files cannot be
        fetched from the Hub now."""
        source = self._sources.get(repo_id)
        if source is None:
            raise RepoNotFound(f"no tokenizer of {repo_id[:200]!r} is served here; the names of base models are served")
        files = _files(source if source.is_dir() else self._fetch(str(source)))
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

    def _fetch(self, source: str) -> Path:
        """The tokenizer's folder in the hub cache, downloaded if needed. Raises Unavailable."""
        if source in self._fetched:
            return self._fetched[source]
        # Anybody may send this request, and a Hub that is away is slow to fail. So one thread waits for the Hub, and
        # the others wait only for a moment.
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise Unavailable(f"the tokenizer of {source} is being fetched; try again soon")
        try:
            return self._fetched.get(source) or self._fetch_now(source)
        finally:
            self._lock.release()

    def _fetch_now(self, source: str) -> Path:
        from huggingface_hub import snapshot_download

        if time.monotonic() < self._failed.get(source, 0.0):
            raise Unavailable(f"the tokenizer of {source} could not be fetched; try again in a minute")
        try:
            self._fetched[source] = Path(snapshot_download(source, allow_patterns=[*_FILES, _TEMPLATES]))
        except (OSError, ValueError) as error:
            self._failed[source] = time.monotonic() + _TRY_AGAIN_S
            raise Unavailable(
                f"the tokenizer of {source} cannot be fetched: {type(error).__name__}; try again in a minute"
            ) from None
        return self._fetched[source]


def _sources(bases: BaseModels) -> dict[str, Path]:
    """Tokenizer sources by every id that a client may request. A base model's full name takes precedence over a
    shortened hub id."""
    sources = {name: Path(bases.tokenizer(name)) for name in bases.names()}
    served = dict(sources)
    for name, source in sources.items():
        served.setdefault(ids.hub_id(name), source)
        if name.startswith(_LLAMA_3):
            served.setdefault(_OPEN_LLAMA_3, source)
        if not source.is_dir():
            served.setdefault(str(source), source)
    return served


def _files(folder: Path) -> dict[str, HubFile]:
    paths = [*(folder / name for name in _FILES), *sorted(folder.glob(_TEMPLATES))]
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
