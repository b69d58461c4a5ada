"""Finds and checks the files of models in Hugging Face's format, without a library that loads them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from app.domain.records import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from app.errors import BadRequest, SetupError
from app.services.imports.safetensors import check_whole

# The files beside each other that transformers and vLLM read. Mistral's models have their weights a second time, in
# consolidated.safetensors.
_WEIGHTS = "*.safetensors"
READ = (_WEIGHTS, "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
NOT_READ = ("*/*", "consolidated*")
_AGAIN = "download the model again"


def check(folder: Path) -> None:
    """Raises SetupError when a file is missing, cannot be read or is cut off, or when config.json does not name the
    architecture."""
    if not _json(folder / CONFIG_FILE).get("architectures"):
        raise SetupError(f"{folder / CONFIG_FILE} names no architectures; add them")
    index = folder / WEIGHTS_INDEX_FILE
    named = _json(index).get("weight_map") if index.exists() else {"": WEIGHTS_FILE}
    if not isinstance(named, dict) or not named:
        raise SetupError(f"{index} names no files; {_AGAIN}")
    for name in sorted(set(map(str, named.values()))):
        _check_whole(folder / name)


def weight_bytes(source: str) -> int:
    """Bytes of the weights of a folder, or of a hub id whose download is complete; else 0."""
    folder = Path(source).expanduser()
    found = folder if folder.is_dir() else _cached(source)
    return sum(file.stat().st_size for file in found.glob(_WEIGHTS)) if found else 0


def downloaded() -> set[str]:
    """The hub ids of the models in the hub's cache that have weights."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return set()
    return {repo.repo_id for repo in repos if repo.repo_type == "model" and weight_bytes(repo.repo_id)}


def check_cache(hub_id: str) -> None:
    """Raises SetupError when a file of the model cannot be written to the hub's cache. It leaves no file there.

    Users may share a cache: then one may have made a folder in it that others cannot write.
    """
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    cache, name = Path(HF_HUB_CACHE), repo_folder_name(repo_id=hub_id, repo_type="model")
    for folder in (cache / name / "blobs", cache / name / "snapshots", cache / ".locks" / name):
        there = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            raise SetupError(
                f"{hub_id} cannot be downloaded into the Hugging Face cache {cache}: {there}: {error.strerror}; set "
                f"{cache_variable()} to a folder that this user can write"
            ) from None


def cache_variable() -> str:
    """The environment variable that decides where the hub's cache is."""
    is_set = any(name in os.environ for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    return "HF_HUB_CACHE" if is_set else "HF_HOME"


def _cached(hub_id: str) -> Path | None:
    """The folder of a hub id in the hub's cache, if all of its files are there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, local_files_only=True, allow_patterns=[_WEIGHTS], ignore_patterns=[*NOT_READ])
        )
    except (OSError, ValueError):
        return None


def _check_whole(file: Path) -> None:
    try:
        check_whole(file)
    except FileNotFoundError:
        raise SetupError(f"there is no {file}; {_AGAIN}, as safetensors: other formats are not read") from None
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}; correct its permissions") from None
    except BadRequest as error:
        raise SetupError(f"{error}; {_AGAIN} into {file.parent}") from None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}; {_AGAIN}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SetupError(f"{file} is not a JSON object; {_AGAIN}")
    return found
