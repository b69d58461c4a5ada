"""Workers hold the locks of their GPUs while they start, and a process that is killed holds none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.process.gpu_start_locks import starting

_HOLDER = """
import sys, time
from pathlib import Path
from workers.process.gpu_start_locks import starting
with starting(Path(sys.argv[1]), ["0"], alone=True):
    print("holds", flush=True)
    time.sleep(600)
"""
# Each line of its output names the kind of worker that may start on the GPU at that time.
_REPORT = """
import fcntl, importlib.machinery, os, sys
from types import SimpleNamespace
from app import settings
from workers.process import gpu_start_locks
gpu_start_locks.visible = lambda environ: ["0"]

def free(kind):
    [file] = gpu_start_locks._opened(settings.from_environment().handover_dir, ["0"])
    try:
        return gpu_start_locks._locked([file], kind)
    finally:
        os.close(file)

def report(when):
    print(when, "any" if free(fcntl.LOCK_EX) else "trainer" if free(fcntl.LOCK_SH) else "none", flush=True)
"""
# A worker of a queue, up to the start of its engine.
_WORKER = f"""{_REPORT}
class Assembly:
    def find_spec(self, name, path, target=None):
        if name == "workers.process.assembly":
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        report("imports")
        module.start = lambda *_: report("starts") or "direct"

sys.meta_path.insert(0, Assembly())
from workers import celery_app
from workers.process import runtime
runtime.become(SimpleNamespace(leave=None, hand_back=None))
celery_app.app.amqp.queues.select(sys.argv[1])
celery_app._become(SimpleNamespace(hostname="worker-0@here"))
report("serves")
"""
# A rank of a trainer, beside rank 0.
_RANK = f"""{_REPORT}
backend = SimpleNamespace(open=lambda: report("starts"), follow=lambda: report("serves"))
sys.modules["workers.backends.training.backends"] = SimpleNamespace(create=lambda base, full: backend)
from workers import cli
cli._follow(settings.from_environment(), None, full=False)
"""


def test_a_killed_process_keeps_nobody_from_its_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        holder.kill()
        with starting(tmp_path, ["0"], alone=True):
            pass


@pytest.mark.parametrize("queue", ["train.tiny", "full.tiny", "sample.tiny", "fullsample.tiny"])
def test_a_sampler_starts_alone_from_its_imports_on_and_a_trainer_beside_trainers(queue: str, tmp_path: Path) -> None:
    samples = "sample" in queue
    wanted = ["imports none", "starts none"] if samples else ["imports any", "starts trainer"]
    assert reported(tmp_path, _WORKER, queue) == [*wanted, "serves any"]


def test_each_rank_of_a_trainer_starts_beside_trainers(tmp_path: Path) -> None:
    assert reported(tmp_path, _RANK) == ["starts trainer", "serves any"]


def reported(folder: Path, script: str, *arguments: str) -> list[str]:
    settings = folder / "tinsmith.toml"
    settings.write_text(f'data_dir = "{folder}"\n[engine]\nhandover_dir = "{folder}"')
    environ = {**os.environ, "TINSMITH_SETTINGS": str(settings), "TINSMITH_REDIS_URL": "redis://127.0.0.1:1"}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
