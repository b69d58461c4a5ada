"""The data folder: its layout, its secrets, and the lock that only one stack at a time holds."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from app.errors import SetupError

# A worker that is in a long call ends itself 27 s after it was told to.
_LEFTOVERS_WAIT_S = 40.0
_OTHERS = 0o077
# Nobody else gets past a folder with neither of these.
_ENTER = 0o011
# The folders that workers make.
_MADE_LATER = ("objects", "snapshots", "cache", "handover")


class DataFolder:
    """The folder of one stack, created if necessary, private to its user, and locked until `close`.

    The lock is an flock on an open file that every child process inherits. So it is held until the last process of a
    stack is gone, however the stack ended, and two Valkey servers never write one append-only file.
    """

    def __init__(self, root: Path) -> None:
        """Opens and locks the folder. Raises SetupError when it cannot be written, made private or locked, or another
        stack runs on it."""
        self.root = root.expanduser().absolute()
        self.logs = self.root / "logs"
        self.run = self.root / "run"
        self.models = self.root / "models"
        self.valkey = self.root / "valkey"
        self.lock_fd = self._open_lock()
        self._lock()

    def kept_secret(self, name: str, make: Callable[[], str]) -> str:
        """The text of file `name`. The file is made on first use and is readable only by its owner."""
        path = self.root / name
        if not path.exists():
            write_private(path, make() + "\n")
        return path.read_text().strip()

    def close(self) -> None:
        os.close(self.lock_fd)

    def _open_lock(self) -> int:
        try:
            self._make_folders()
            (self.run / ".writable").touch()
            (self.run / ".writable").unlink()
            return os.open(self.run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise unwritable(self.root, error) from None

    def _make_folders(self) -> None:
        """Makes the folders, and takes the permissions of other users on those that an earlier version made.

        A `root` that held something else before its first stack may be meant for others: then only our folders in it
        become private. So does one of another user, such as a volume's, which we could not change.
        """
        is_ours = not self.root.exists() or (self.run / "lock").exists()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours and self.root.stat().st_uid == os.geteuid():
            _make_private(self.root)
        for folder in (self.logs, self.run, self.models, self.valkey):
            folder.mkdir(mode=0o700, exist_ok=True)
            if not folder.is_symlink():  # its target is the operator's own
                _make_private(folder)
        for folder in (self.root / name for name in _MADE_LATER):
            if folder.is_dir() and not folder.is_symlink():
                _make_private(folder)

    def _lock(self) -> None:
        deadline = time.monotonic() + _LEFTOVERS_WAIT_S
        while not self._try_lock():
            user = f"another stack uses the data folder {self.root} (process {self._holder()}); stop it"
            if not (alive := self._holder_is_alive()):
                user = f"processes of a stack that was killed still use the data folder {self.root}; end them"
            if alive or time.monotonic() > deadline:
                os.close(self.lock_fd)
                raise SetupError(f"{user}, or choose another folder with --data-dir")
            time.sleep(0.1)
        try:
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(self.lock_fd)
            raise unwritable(self.root, error) from None

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            os.close(self.lock_fd)
            raise _without_locks(self.root, error) from None
        return True

    def _holder(self) -> str:
        return os.pread(self.lock_fd, 32, 0).decode() or "unknown"

    def _holder_is_alive(self) -> bool:
        """False when only processes of a killed stack still hold the lock. Those processes end by themselves."""
        return Path("/proc", self._holder()).exists()


def is_in_use(root: Path) -> bool:
    """True while a stack runs on the folder. It takes and frees the lock for this, and changes nothing. False on a file
    system without locks, on which no stack starts."""
    try:
        lock_fd = os.open(root.expanduser() / "run" / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock_fd)
    return False


def check_locks(folder: Path, there: Path) -> None:
    """Raises SetupError when the file system of `there`, which is `folder` or will hold it, has no locks. It leaves no
    file there."""
    with tempfile.TemporaryFile(dir=there) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _without_locks(folder, error) from None


def unwritable(folder: Path, error: OSError) -> SetupError:
    """The error of a stack that cannot write to its data folder."""
    return SetupError(f"cannot write to the data folder {folder}: {error.strerror}; choose another with --data-dir")


def _without_locks(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"cannot lock the data folder {folder}: {error.strerror}; its file system has no locks: mount it with `flock` "
        "(Lustre) or with a lock service (NFS), or choose a folder on a local disk with --data-dir"
    )


def _make_private(folder: Path) -> None:
    """Takes all permissions of other users. Raises SetupError where that fails and other users can reach the folder.

    Only its user may change a folder, and some mounts let nobody: CIFS ignores a chmod, and some FUSE refuse it.
    """
    if not _mode(folder) & _OTHERS:
        return
    with suppress(OSError):
        folder.chmod(_mode(folder) & ~_OTHERS)
    if _mode(folder) & _OTHERS and all(_mode(parent) & _ENTER for parent in folder.parents):
        raise SetupError(
            f"other users can read {folder} (mode {_mode(folder):o}), which holds training data and belongs to user "
            f"{folder.stat().st_uid}: run `chmod 700 {folder}` as that user. Where the file system has no permissions, "
            "mount it with dir_mode=0700,file_mode=0600 (CIFS) or umask=077 (FUSE), or below a folder of mode 700. Or "
            "choose another folder with --data-dir"
        )


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_private(path: Path, text: str) -> None:
    """Writes a file of mode 0600 atomically: it appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
