"""Where a base model's tokenizer lies: a local folder, or the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.errors import BadRequest, Unavailable

Find = Callable[[str], Path | None]
"""A file of the tokenizer by its name, or None when it has no such file."""


def find_in(source: str) -> Find:
    """`source`: a folder, or a hub id, whose files are fetched unless HF_HUB_OFFLINE is set."""
    if source.startswith(("/", ".", "~")) or Path(source).is_dir():
        folder = Path(source).expanduser()
        return lambda name: folder / name if (folder / name).is_file() else None
    return lambda name: _from_hub(source, name)


def read_json(find: Find, name: str) -> dict[str, Any]:
    """Empty when there is no such file."""
    path = find(name)
    found = json.loads(path.read_text()) if path else {}
    return found if isinstance(found, dict) else {}


def _from_hub(source: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except LocalEntryNotFoundError:
        # Offline, the cache cannot tell a file it has not fetched from one there is not.
        return None
    except EntryNotFoundError:
        return None
    except HFValidationError:
        raise BadRequest(f"the tokenizer {source!r} is neither a folder here nor a hub id") from None
    except (HfHubHTTPError, OSError) as error:
        raise Unavailable(f"the tokenizer {source!r} cannot be fetched: {type(error).__name__}") from None
