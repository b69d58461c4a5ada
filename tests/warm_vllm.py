"""vLLM in a test's own process, whose processes are forked with their slow imports done: a start takes seconds.

vLLM itself starts two processes one after the other, and a third one for each architecture that the machine has not
served before. Each imports for 15 s. The stacks of tests/contract/ start vLLM as a user does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch

# What vLLM's processes for a CPU import. The worker extension must not be among it: it acts on its import.
_SLOW = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process: Any) -> None:
        with mock.patch.object(forkserver, "connect_to_new_process", _server().connect_to_new_process):
            super()._launch(process)


class _Process(ForkServerProcess):
    """A process that takes over the environment of its start, as one that is not forked from a server would."""

    @staticmethod
    def _Popen(process: BaseProcess) -> _Popen:  # noqa: N802 - the name that multiprocessing calls
        return _Popen(process)

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        _patch()
        super().run()


class _Context(ForkServerContext):
    Process = _Process


@cache
def _server() -> forkserver.ForkServer:
    """The server of such forks: in a fork, the one it came from. Python itself would start another one there."""
    if forkserver.get_inherited_fds() is not None:
        forkserver._forkserver.ensure_running = lambda: None
        return forkserver._forkserver
    server = forkserver.ForkServer()
    server.set_forkserver_preload([__name__, *_SLOW])
    return server


def use() -> None:
    """Makes vLLM start its processes so from here on, unless there is a GPU: a fork cannot use what its parent has."""
    from workers.backends.sampling.vllm import engine

    if not torch.cuda.is_available():
        engine._start = _warm(engine._start)


def _warm(start: Callable[..., Any]) -> Callable[..., Any]:
    async def start_warm(engine_args: dict[str, Any]) -> Any:
        _patch()
        return await start(engine_args)

    return start_warm


@cache
def _patch() -> None:
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = multiproc_executor.get_mp_context = _Context
    registry._run_in_subprocess = lambda inspect: inspect()
