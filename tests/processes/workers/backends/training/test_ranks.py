"""A rank outlives no other rank of its machine for long, also where nothing reports the other's death."""

from __future__ import annotations

import subprocess
import sys

# A follower that waits for another rank in one call of a library, as over NCCL. It ignores the launcher's signals.
FOLLOWER = """
import hashlib, signal, sys
from types import SimpleNamespace
import psutil
from workers.backends.training import ranks
from workers.backends.training.trainer import Trainer

class Stuck(ranks.RankGroup):
    def receive(self):
        print("stuck", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

signal.signal(signal.SIGTERM, signal.SIG_IGN)
ranks._LAST_S = 0.0
group = Stuck(1, 2, siblings=(psutil.Process(int(sys.argv[1])),))
Trainer.follow(SimpleNamespace(_engine=SimpleNamespace(ranks=group)))
"""


def test_a_follower_that_waits_for_a_dead_rank_ends():
    with subprocess.Popen(["sleep", "600"]) as rank:
        command = [sys.executable, "-c", FOLLOWER, str(rank.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            try:
                assert follower.stdout is not None and follower.stdout.readline() == "stuck\n"
                assert follower.poll() is None
                rank.kill()
                assert follower.wait(timeout=120) == 1
            finally:
                follower.kill()
                rank.kill()
