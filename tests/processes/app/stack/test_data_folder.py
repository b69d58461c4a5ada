from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from app.errors import SetupError
from app.stack.data_folder import DataFolder
from tests.processes.app.stack.running import alive

LEAVE_A_PROCESS = """
import subprocess, sys
from pathlib import Path
from app.stack.data_folder import DataFolder
folder = DataFolder(Path(sys.argv[1]))
left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, pass_fds=(folder.lock_fd,))
print(left.pid)
"""


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    with closing(DataFolder(tmp_path)) as folder:
        assert folder.kept_secret("api-key", lambda: "tml-first") == "tml-first"
        assert folder.kept_secret("api-key", lambda: "tml-second") == "tml-first"
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600


def test_a_second_stack_on_a_folder_is_refused_with_the_process_that_has_it(tmp_path):
    with closing(DataFolder(tmp_path)), pytest.raises(SetupError, match=f"process {os.getpid()}.*--data-dir"):
        DataFolder(tmp_path)


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


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/data: Not a directory; choose another with --data-dir"):
        DataFolder(tmp_path / "file" / "data")
