"""An object store in one local folder: one file per object, with signed URLs that our own API serves."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from app.domain.checkpoints import FileEntry
from app.errors import NotFound, SetupError, Unavailable
from app.signing import UrlSigner
from app.stores.disk import Disk
from app.stores.objects.base import (
    check_key,
    check_prefix,
    copy_bounded,
    file_entry,
    flush,
    flush_folder,
    is_key,
    reader,
    temporary_file,
    whole_file,
)
from app.telemetry import store_call

_UNFINISHED = ".unfinished"
# Longer than any copy takes; a younger file may belong to a live process.
_ABANDONED_S = 86_400
# A delete may remove the folder that the next link goes into; each try meets at most one such delete.
_TRIES = 20


class FolderStore:
    """An ObjectStore under `root`. Raises Unavailable for a key that is a folder of another key, for a file with which
    less than `least_free` bytes of the disk would be free, and in place of NotFound while `root` is not mounted.

    A write goes to `root/.unfinished` first. The file is then linked into place, which is atomic and fails when the
    key exists. Files are their user's alone, unless others may write to `root`: these share the store, and get the
    permissions that they have there.
    Raises SetupError when `root` cannot be written or has no hard links.
    """

    def __init__(self, root: Path, url_secret: str, public_url: str, least_free: int = 0) -> None:
        self._root = root.absolute()
        self._unfinished = self._root / _UNFINISHED
        self._disk = Disk("the object store", self._root, least_free)
        self._signer = UrlSigner(url_secret, public_url)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._shared = _shared(self._root)
            self._make_folder(self._unfinished)
            with temporary_file(self._unfinished) as (_, temporary):
                self._check_links(temporary)
        except OSError as error:
            raise SetupError(
                f"the object store folder {self._root} cannot be written ({error.strerror}): "
                "make it writable or set store.url to another one"
            ) from None
        _remove_abandoned(self._unfinished)

    @store_call("put")
    def put_new(self, key: str, source: Path | bytes) -> bool:
        """Stores a file; False (nothing changes) when the key exists. The file is on disk when the call returns."""
        target = self._path(key)
        with self._outages():
            if target.exists():
                return False
            with temporary_file(self._unfinished) as (file, temporary), reader(source) as data:
                self._write(data, file)
                return self._link(temporary, target)

    @store_call("get")
    def get(self, key: str, target: Path, most_bytes: int | None = None) -> None:
        """Fetches an object to a local file, whole or not at all. Raises NotFound, and TooLarge."""
        with self._outages(key), self._path(key).open("rb") as data, whole_file(target) as file:
            copy_bounded(iter(partial(data.read, 2**20), b""), file, most_bytes)

    @store_call("get")
    def entry(self, key: str) -> FileEntry:
        """The size and sha256 of an object. Raises NotFound."""
        with self._outages(key):
            return file_entry(self._path(key))

    @store_call("read")
    def read(self, key: str) -> bytes:
        """The bytes of a small object. Raises NotFound."""
        with self._outages(key):
            return self._path(key).read_bytes()

    @store_call("copy")
    def copy(self, source: str, target: str) -> None:
        """Gives an object a second key: a hard link to the same file. A repeat changes nothing. Raises NotFound."""
        found, place = self._path(source), self._path(target)
        with self._outages():
            if not found.is_file():
                raise self._absence(source)
            self._link(found, place)

    @store_call("list")
    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        folder = self._root / check_prefix(prefix).rpartition("/")[0]
        keys = (path.relative_to(self._root).as_posix() for path in _files(folder))
        found = sorted(key for key in keys if key.startswith(prefix) and is_key(key))
        self._check_mounted()
        return found

    def page(self, prefix: str, after: str, limit: int) -> Sequence[str]:
        """The first `limit` of these keys that come behind `after`."""
        return [key for key in self.list(prefix) if key > after][:limit]

    @store_call("list")
    def folders(self, prefix: str) -> Sequence[str]:
        """The next part of the keys that start with `prefix` and have a further one, sorted."""
        folder = self._root / check_prefix(prefix)
        with self._outages():
            found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        self._check_mounted()
        return [name for name in found if not name.startswith(".")]

    @store_call("delete")
    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects. A missing key is no error.

        Empty folders are removed too; otherwise a long run would leave one folder for each snapshot.
        """
        for key in keys:
            path = self._path(key)
            with self._outages():
                path.unlink(missing_ok=True)
            self._remove_empty(path.parent)
        self._check_mounted()

    @store_call("size")
    def size(self, key: str) -> int:
        """The bytes of an object. Raises NotFound."""
        path = self._path(key)
        with self._outages(key):
            if path.is_dir():
                raise IsADirectoryError(path)
            return path.stat().st_size

    def presign(self, key: str, expires_s: int) -> str:
        """A URL of our API that needs no credentials and stops working after `expires_s` seconds.

        Raises NotFound when the settings hold no url_secret.
        """
        return self._signer.url(_route(check_key(key)), int(time.time()) + expires_s)

    def presign_put(self, key: str, expires_s: int, most_bytes: int) -> str:
        """A URL of our API to which anyone may send the object with one HTTP PUT, for `expires_s` seconds. Raises
        NotFound as `presign` does."""
        return self._signer.url(_put_route(check_key(key), most_bytes), int(time.time()) + expires_s)

    def check_put(self, key: str, most_bytes: int, expires: int, signature: str) -> None:
        """Raises Forbidden unless `presign_put` made the URL with these parts, and it has not expired."""
        self._signer.check(_put_route(key, most_bytes), expires, signature)

    def replace(self, key: str, data: IO[bytes]) -> None:
        """Stores an object, in the place of an earlier one. Whoever reads the earlier one goes on reading it."""
        target = self._path(key)
        with self._outages():
            self._make_folder(target.parent)
            with temporary_file(self._unfinished) as (file, temporary):
                self._write(data, file)
                temporary.replace(target)
            flush_folder(target.parent)

    def open_signed(self, key: str, expires: int, signature: str) -> Path:
        """The file behind a URL of `presign`. Raises Forbidden (wrong signature, or expired) or NotFound."""
        self._signer.check(_route(key), expires, signature)
        path = self._path(key)
        if not path.is_file():
            raise self._absence(key)
        return path

    def _check_links(self, temporary: Path) -> None:
        link = temporary.with_suffix(".link")
        try:
            os.link(temporary, link)
        except OSError as error:
            raise SetupError(
                f"the object store folder {self._root} is on a file system without hard links ({error.strerror}): move "
                "it to another one, such as ext4, XFS or NFS, or set store.url to a folder there or to an S3 server"
            ) from None
        finally:
            link.unlink(missing_ok=True)

    def _write(self, data: IO[bytes], file: BinaryIO) -> None:
        self._disk.copy(data, file)
        if self._shared:
            os.fchmod(file.fileno(), 0o600 | self._shared & 0o066)
        flush(file)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _link(self, temporary: Path, target: Path) -> bool:
        for _ in range(_TRIES):
            try:
                self._make_folder(target.parent)
                os.link(temporary, target)
            except FileNotFoundError:
                continue
            except FileExistsError:
                return False
            flush_folder(target.parent)
            return True
        raise Unavailable(
            f"the folder {target.parent} is deleted again and again while a file is written to it; try again soon"
        )

    def _make_folder(self, folder: Path) -> None:
        if folder == self._root or folder.is_dir():
            return
        self._make_folder(folder.parent)
        # If a file has this name, the later link fails. FileExistsError must only mean that the key exists.
        with suppress(FileExistsError):
            folder.mkdir()
            if self._shared:
                folder.chmod(_mode(folder) | self._shared)
        flush_folder(folder.parent)

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _absence(self, key: str) -> NotFound:
        """The error for a missing object. Raises Unavailable if all objects are missing."""
        self._check_mounted()
        return NotFound(f"object {key!r} does not exist")

    def _check_mounted(self) -> None:
        """Raises Unavailable unless the folder is the one that the start of this process found or made. Asked after a
        look, so that a disk which goes meanwhile is noticed."""
        if not self._unfinished.is_dir():
            raise Unavailable(
                f"the object store folder {self._root} has no {_UNFINISHED}, as it had when this process started: "
                "mount its disk again"
            )

    @contextmanager
    def _outages(self, key: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if key and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise self._absence(key) from None
            raise Unavailable(f"the object store folder {self._root} failed: {error.strerror}") from error


def _route(key: str) -> str:
    return f"objects/{key}"


def _put_route(key: str, most_bytes: int) -> str:
    return f"uploads/{most_bytes}/{key}"


def _shared(root: Path) -> int:
    """The permissions of the group and of others on a folder, of each only if it may write there."""
    mode = _mode(root)
    return sum(mode & whole for write, whole in ((0o020, 0o070), (0o002, 0o007)) if mode & write)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names)


def _remove_abandoned(folder: Path) -> None:
    oldest = time.time() - _ABANDONED_S
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()
