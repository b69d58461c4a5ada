"""Object stores: a local folder or an S3 server. `create` makes the one that the settings name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.errors import SetupError
from app.settings import Settings
from app.stack.redaction import without_secrets
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore

__all__ = ["FolderStore", "create", "folder_of", "name_of"]


def create(settings: Settings, *, may_be_away: bool = False) -> ObjectStore:
    """The store of `settings.store.url`.

    Raises SetupError, which says what to change, when the store cannot be written or does not answer. With
    `may_be_away`, a server that does not answer is no error.
    """
    folder, url = folder_of(settings), settings.store.url
    if folder is not None:
        return FolderStore(folder, settings.url_secret, settings.public_url, settings.engine.free_disk_bytes)
    if urlsplit(url).scheme not in ("http", "https"):
        raise SetupError(f"store.url {url!r} is not file:///folder or http(s)://host:port/bucket")
    # The import of the minio client takes a third of a second; a folder store does not need it.
    from app.stores.objects.s3 import S3Store

    return S3Store(settings.store, may_be_away=may_be_away)


def folder_of(settings: Settings) -> Path | None:
    """The folder of a folder store; None for an S3 server. Raises SetupError for a URL that names no folder."""
    url = settings.store.url
    if not url:
        return settings.data_dir / "objects"
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        return None
    if parts.scheme != "file" or parts.netloc or len(parts.path) < 2:
        raise SetupError(f"store.url {url!r} is not file:///folder: give an absolute folder after file://")
    return Path(unquote(parts.path))


def name_of(settings: Settings) -> str:
    """The store as a message names it: its URL without secrets, or the folder."""
    return without_secrets(settings.store.url) if settings.store.url else str(settings.data_dir / "objects")
