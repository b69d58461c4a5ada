"""The source of a base model, a folder or a hub id, and the error for one that cannot be loaded.

The error is one line: which model or tokenizer, from where, why, and what to do. transformers raises errors of any
type, and some contain paragraphs of advice that does not apply here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.backends.failures import ran_out_of_memory

_SHOWN_CHARACTERS = 300
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_REASONS = {
    "trust_remote_code": "it needs Python code from its repository, and Tinsmith runs no such code",
    "ignore_mismatched_sizes": "its weights do not have the shapes that its config.json gives",
    "does not recognize this architecture": "the installed transformers does not know its architecture",
    "for this kind of AutoModel": "its architecture does not generate text",
    "key in its config.json": "its config.json names no model_type",
    "no file named model.safetensors": "there is no model.safetensors in it, and other formats are not read",
    "not appear to have a file named model.safetensors": "it has no model.safetensors, and other formats are not read",
}


def local_path(path: str) -> str:
    """A folder's path with ~ resolved; a hub id is returned unchanged."""
    return str(Path(path).expanduser())


@contextmanager
def explained(settings: BaseModelSettings, *, tokenizer: bool = False) -> Iterator[None]:
    """Raises SetupError when the block cannot load the base model, or its tokenizer. An out-of-memory error may pass,
    so it is raised unchanged."""
    source = settings.tokenizer or settings.path if tokenizer else settings.path
    what = f"the tokenizer of base model {settings.name!r}" if tokenizer else f"base model {settings.name!r}"
    is_there = Path(local_path(source)).exists()
    if source.startswith(("/", "./", "../", "~")) and not is_there:
        raise SetupError(f"{what}: there is no folder {source!r}; correct its path")
    try:
        if is_there:
            _check_readable(Path(local_path(source)))
        yield
    except SetupError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        if is_there:
            raise SetupError(f"{what} cannot be loaded from {source!r}: {_cause(error)}") from error
        raise SetupError(
            f"{what} cannot be loaded from {source!r} on the Hugging Face hub: {_of_cache(error) or _cause(error)}; or "
            f"give a local folder: {_local_form(settings, tokenizer=tokenizer and bool(settings.tokenizer))}"
        ) from error


def _check_readable(folder: Path) -> None:
    """Raises PermissionError for a file that may not be read; safetensors would call it missing."""
    for file in folder.glob("*"):
        if not file.is_dir() and not os.access(file, os.R_OK):
            raise PermissionError(
                f"user {os.getuid()} cannot read {file.name}; correct its permissions, or replace a link by the file "
                "itself"
            )


def _local_form(settings: BaseModelSettings, *, tokenizer: bool) -> str:
    return 'tokenizer = "/path/to/folder"' if tokenizer else f"--base-model {settings.name}=/path/to/folder"


def _of_cache(error: Exception) -> str:
    """The cause if this user may not use a file of the hub's cache; else empty. transformers then writes that another
    user downloads the model."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.filename and each.errno in _NOT_ALLOWED:
            return f"{each.filename}: {each.strerror}; set HF_HOME to a folder that this user can write"
    return ""


def _cause(error: Exception) -> str:
    chain = list(_chain(error))
    for index, each in enumerate(chain):
        if isinstance(each, GatedRepoError):
            return "it is gated: ask for access there, and set HF_TOKEN to a token that has it"
        if isinstance(each, RepositoryNotFoundError):
            return "there is no such model, or it is private and HF_TOKEN may not read it"
        if isinstance(each, LocalEntryNotFoundError):
            return _away(chain[index + 1 :])
    text = " ".join(str(error).split())
    for marker, reason in _REASONS.items():
        if marker in text:
            return reason
    return _shown(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {_shown(error)}"


def _away(reasons: list[BaseException]) -> str:
    if not reasons:
        return "HF_HUB_OFFLINE is set, and this machine's cache does not have it"
    return f"the hub cannot be reached ({_shown(reasons[0])})"


def _shown(error: BaseException) -> str:
    """The error's text in one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
