"""Tokenizers of the Hugging Face Hub, in its cache on this disk. A Hub that is away or slow holds no caller long."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from app.domain.records import CONFIG_FILE, PROCESSOR_FILES, TEMPLATE_FOLDER, TOKENIZER_FILES
from app.errors import BadRequest, RequestError, Unavailable

FILES = (CONFIG_FILE, *TOKENIZER_FILES, *PROCESSOR_FILES)
"""The files of a tokenizer's folder, beside those that match TEMPLATES."""
TEMPLATES = f"{TEMPLATE_FOLDER}/*.jinja"
_PATIENCE_S = 5.0
_ANSWER_S = 10.0
_TRY_AGAIN_S = 60.0
# A Hub that falls silent within a fetch can hold its thread without an end. Then another one starts.
_LONGEST_S = 600.0


class HubCache:
    """Finds the folders of tokenizers, and fetches those of the Hub on first use. Safe to use from any thread."""

    def __init__(self) -> None:
        self._fetches: dict[str, _Fetch] = {}
        self._lock = threading.Lock()

    def folder(self, source: str) -> Path:
        """The tokenizer's folder. `source`: a folder, which may be missing, or a hub id. Raises BadRequest for a source
        that is neither, or that HF_HUB_OFFLINE keeps from being fetched, and Unavailable when the files cannot be
        fetched now. The fetch goes on without its callers, so that a later call finds the files."""
        if source.startswith(("/", ".", "~")) or Path(source).is_dir():
            return Path(source).expanduser()
        with self._lock:
            fetch = self._fetches.get(source)
            if fetch is None or fetch.is_over():
                fetch = _Fetch(source, fetch.found if fetch else None)
                threading.Thread(target=fetch.run, name=f"fetch {source}", daemon=True).start()
                self._fetches[source] = fetch
        return fetch.folder()


class _Fetch:
    """One fetch of a tokenizer, and its outcome. `found`: the folder of an earlier fetch, which serves meanwhile."""

    def __init__(self, source: str, found: Path | None) -> None:
        self._source, self.found, now = source, found, time.monotonic()
        self._patient_until, self._until = now + _PATIENCE_S, now + _LONGEST_S
        self._done = threading.Event()
        self._error: RequestError = Unavailable(f"{_named(source)} is being fetched; try again soon")

    def run(self) -> None:
        try:
            self.found, lasts = _fetch(self._source)
        except RequestError as error:
            self._error, lasts = error, False
        self._until = math.inf if lasts else time.monotonic() + _TRY_AGAIN_S
        self._done.set()

    def is_over(self) -> bool:
        """Whether the outcome is too old to count."""
        return time.monotonic() >= self._until

    def folder(self) -> Path:
        """The folder, once there is one. All callers together wait for a moment only, since they are many and the
        threads of the API few."""
        if self.found is None:
            self._done.wait(max(0.0, self._patient_until - time.monotonic()))
        if self.found is None:
            raise type(self._error)(str(self._error))  # a new one, because several threads raise it
        return self.found


def _fetch(source: str) -> tuple[Path, bool]:
    """The folder, and whether the Hub has answered; else the folder is as it was in the cache. Raises BadRequest or
    Unavailable."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    offline, away = constants.HF_HUB_OFFLINE, ""
    try:
        if not offline:
            HfApi().model_info(source, timeout=_ANSWER_S)  # snapshot_download waits for a silent Hub without an end
    except Exception as error:  # of the Hub, of the network, or of the HTTP library
        away = type(error).__name__
    # Nothing more comes now, and huggingface_hub refuses a folder that lacks one of the wanted files.
    wanted = ["tokenizer.json"] if offline or away else [*FILES, TEMPLATES]
    try:
        folder = snapshot_download(source, allow_patterns=wanted, local_files_only=offline or bool(away))
    except HFValidationError:
        raise BadRequest(
            f"the tokenizer {source!r} is neither a folder here nor a hub id; correct base_models.tokenizer"
        ) from None
    except Exception as error:  # as above
        if offline:
            raise BadRequest(
                f"the tokenizer {source!r} is not in the Hub's cache of the API, and HF_HUB_OFFLINE is set; put its "
                "files into a folder that the API can read (setting base_models.tokenizer)"
            ) from None
        reason = away or type(error).__name__
        raise Unavailable(f"{_named(source)} cannot be fetched: {reason}; try again in a minute") from None
    return Path(folder), not (offline or away)


def _named(source: str) -> str:
    """The source and the Hub's host; HF_ENDPOINT may hold a password."""
    from huggingface_hub import constants

    return f"the tokenizer of {source} from {urlsplit(constants.ENDPOINT).hostname}"
