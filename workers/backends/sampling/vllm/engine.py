"""Runs vLLM's AsyncLLM on its own asyncio loop, and sets the environment it starts in."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from app.errors import ServerOpError
from app.settings import BaseModelSettings
from workers.backends.failures import StallDetector
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.backends.sampling.vllm.start_errors import explained
from workers.backends.sampling.vllm.worker import SAMPLER_PID_VARIABLE
from workers.models.loading.source import local_path

T = TypeVar("T")
_AGAIN_S = 0.02
_LONGEST_FOLDER = 107 - 37


class EngineThread:
    """Owns the loop and the engine in it.

    Raises UnservableModel when vLLM's build does not take the model, and SetupError when the engine does not start.
    """

    def __init__(self, engine_args: dict[str, Any]) -> None:
        self._stopping = False
        self._stall_detector = StallDetector()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        try:
            with explained(engine_args["model"]):
                self.engine = self._wait(_start(engine_args))
                _report_steps(self.engine, self._stall_detector.progress)
        except Exception:
            self._end_loop()
            raise

    @property
    def alive(self) -> bool:
        return not self._stopping and self._thread.is_alive() and not self.engine.errored

    @property
    def stalled_s(self) -> float:
        """Seconds that vLLM has had requests without producing a token."""
        return self._stall_detector.seconds

    def call(self, method: Callable[[Any], Awaitable[T]]) -> T:
        """Runs `method(engine)` on the loop and waits for its result. Raises ServerOpError when stopped."""
        return self._result(lambda: self._begin(method(self.engine)))

    def generate(self, method: Callable[[Any], Awaitable[T]], names: Sequence[str], handle: RequestHandle) -> T:
        """Runs `method` as `call` does, for a method that runs the requests named `names`.

        Once `handle` is aborted, vLLM drops the requests, and each ends with the tokens it has. Then raises Aborted.
        """

        async def run() -> T:
            with self._stall_detector.call():
                return await method(self.engine)

        def begin() -> Future[T]:
            running = self._begin(run())

            def drop() -> None:
                if not running.done():
                    self._begin(_drop(self.engine, names, running))

            handle.on_abort(drop)
            return running

        result = self._result(begin)
        if handle.aborted:
            raise Aborted("the request was aborted")
        return result

    def _result(self, begin: Callable[[], Future[T]]) -> T:
        if self._stopping:
            raise _stopped()
        try:
            return begin().result()
        except CancelledError:
            raise _stopped() from None
        except Exception:
            if self._stopping:  # the call began during the shutdown, and met an engine or a loop that ends
                raise _stopped() from None
            raise

    def stop(self) -> None:
        """Fails all unfinished calls, then ends vLLM's processes and the loop."""
        self._stopping = True
        self._wait(_cancel_tasks())
        self.engine.shutdown()
        self._end_loop()

    def _wait(self, work: Awaitable[T]) -> T:
        return self._begin(work).result()

    def _begin(self, work: Awaitable[T]) -> Future[T]:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _end_loop(self) -> None:
        self._wait(_cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _stopped() -> ServerOpError:
    return ServerOpError("the sampler has stopped: the worker is shutting down")


async def _start(engine_args: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # Of a server's context vLLM has defaults for each kind of GPU. Otherwise it decodes 128 sequences at once on any.
    context = UsageContext.OPENAI_API_SERVER
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args), usage_context=context)


def _report_steps(engine: Any, progress: Callable[[], None]) -> None:
    """Makes vLLM call `progress` in its loop when it receives the tokens of a step.

    This counts the steps of all requests, streamed or not.
    """
    processor = engine.output_processor
    process = processor.process_outputs

    def process_and_report(*args: Any, **named: Any) -> Any:
        progress()
        return process(*args, **named)

    processor.process_outputs = process_and_report


async def _drop(engine: Any, names: Sequence[str], running: Future[Any]) -> None:
    """Drops the requests again and again: vLLM does not yet know a request that it is just accepting."""
    while not running.done():
        await engine.abort(names)
        await asyncio.sleep(_AGAIN_S)


async def _cancel_tasks() -> None:
    """Ends every other task of this loop, so that nothing is pending when it closes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def set_environment(settings: BaseModelSettings) -> None:
    """Sets the environment that vLLM's processes inherit. Variables that the operator set stay."""
    os.environ[SAMPLER_PID_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's own logging config, with a handler for errors of a start, and without one logger: a dying engine would log
    # its requests, stop strings included.
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(Path(__file__).with_name("vllm_logging.json")))
    # A forked child of a process with threads can hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # The path of a socket has at most 107 characters, of which vLLM's name for it takes 37.
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", "/tmp")
    # FlashInfer's sampler serves no seeded request, and all of ours are seeded. vLLM 0.32 runs it at the start all the
    # same, to measure its memory, and FlashInfer then compiles it with nvcc, which not every machine has.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # Without a GPU no layer is compiled (arguments.py). vLLM 0.32 would compile its count of likelier tokens all the
    # same, at the first request, and dies on a machine without a C++ compiler or Python's headers.
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    sources = (settings.path, settings.tokenizer or settings.path)
    if all(Path(local_path(source)).exists() for source in sources):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
