from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from app.errors import SetupError
from app.stack import data_folder
from app.stack.data_folder import DataFolder, check_locks, is_in_use
from tests.processes.app.stack.running import alive

LEAVE_A_PROCESS = """
import subprocess, sys
from pathlib import Path
from app.stack.data_folder import DataFolder
folder = DataFolder(Path(sys.argv[1]))
left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, pass_fds=(folder.lock_fd,))
print(left.pid)
"""

HOLD = """
import os, sys
from pathlib import Path
from app.stack.data_folder import DataFolder
folder = DataFolder(Path(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    with closing(DataFolder(tmp_path)) as folder:
        assert folder.kept_secret("api-key", lambda: "tml-first") == "tml-first"
        assert folder.kept_secret("api-key", lambda: "tml-second") == "tml-first"
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600


def test_a_second_stack_on_a_folder_is_refused_with_the_process_that_has_it(tmp_path):
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout
        pid = holder.stdout.readline().strip()
        with pytest.raises(SetupError, match=rf"\(process {pid}\).*--data-dir"):
            DataFolder(tmp_path)
        holder.communicate()


def test_a_closed_folder_can_be_used_again(tmp_path):
    DataFolder(tmp_path).close()
    DataFolder(tmp_path).close()


def test_a_folder_is_not_free_before_the_last_process_of_a_killed_stack_is_gone(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LEAVE_A_PROCESS, tmp_path], stdout=subprocess.PIPE, check=True)
    left = int(ended.stdout)
    assert alive(left)
    threading.Timer(0.5, os.kill, (left, signal.SIGKILL)).start()
    DataFolder(tmp_path).close()
    assert not alive(left)


def test_processes_of_a_killed_stack_that_do_not_end_are_named_and_not_the_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(data_folder, "_LEFTOVERS_WAIT_S", 0.3)
    ended = subprocess.run([sys.executable, "-c", LEAVE_A_PROCESS, tmp_path], stdout=subprocess.PIPE, check=True)
    try:
        with pytest.raises(SetupError, match="processes of a stack that was killed still use the data folder"):
            DataFolder(tmp_path)
    finally:
        os.kill(int(ended.stdout), signal.SIGKILL)


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/data: Not a directory; choose another with --data-dir"):
        DataFolder(tmp_path / "file" / "data")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK], ids=["Lustre", "NFS"])
def test_a_folder_on_a_file_system_without_locks_is_named_with_the_remedy(code, tmp_path, monkeypatch):
    DataFolder(tmp_path).close()
    files = set(tmp_path.rglob("*"))

    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = (
        rf"data folder {tmp_path}: {os.strerror(code)}; its file system has no locks: mount it with `flock`.*--data-dir"
    )
    with pytest.raises(SetupError, match=said):
        DataFolder(tmp_path)
    with pytest.raises(SetupError, match=said):
        check_locks(tmp_path, tmp_path)
    assert not is_in_use(tmp_path), "no stack can run there"
    assert set(tmp_path.rglob("*")) == files


def test_no_other_user_reads_the_folder_and_an_earlier_versions_is_made_private(tmp_path):
    earlier = tmp_path / "earlier"
    for name in ("run", "logs", "valkey", "models", "objects", "snapshots", "cache", "handover"):
        (earlier / name).mkdir(parents=True)
    (earlier / "run" / "lock").touch()
    for folder in (earlier, *earlier.glob("*")):
        folder.chmod(0o755)
    for root in (earlier, tmp_path / "new"):
        DataFolder(root).close()
        assert {mode(folder) for folder in (root, *root.glob("*"))} == {0o700}


def test_a_folder_that_was_there_for_something_else_keeps_its_own_permissions(tmp_path):
    (tmp_path / "public").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    DataFolder(tmp_path).close()
    assert mode(tmp_path) == mode(tmp_path / "public") == 0o755
    assert {mode(tmp_path / name) for name in ("run", "logs", "valkey", "models")} == {0o700}


def refuses(path, mode):
    raise PermissionError(1, "Operation not permitted")


def does_not_support(path, mode):
    raise OSError(95, "Operation not supported")


def ignores(path, mode):
    """A CIFS mount without cifsacl takes a chmod and does nothing."""


@pytest.mark.parametrize("chmod", [refuses, does_not_support, ignores])
def test_a_folder_that_cannot_be_made_private_is_named_with_the_remedy_unless_nobody_else_reaches_it(
    monkeypatch, chmod
):
    """Everybody may enter /tmp, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        root = Path(parent, "data")
        DataFolder(root).close()
        root.chmod(0o755)
        with monkeypatch.context() as mount:
            mount.setattr("pathlib.Path.chmod", chmod)
            DataFolder(root).close()
        Path(parent).chmod(0o711)
        monkeypatch.setattr("pathlib.Path.chmod", chmod)
        remedy = r"data \(mode 755\), which holds training data .*: run `chmod 700 .*/data`.*file_mode=0600 \(CIFS\)"
        with pytest.raises(SetupError, match=remedy):
            DataFolder(root)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
