"""vLLM's AsyncLLM on an asyncio loop of its own, for callers in many threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from app.errors import ServerOpError, SetupError
from workers.health.standstill import Standstill
from workers.sampling.watch import Aborted, Watch

T = TypeVar("T")
_AGAIN_S = 0.02


class EngineThread:
    """Owns the loop and the engine in it. Raises SetupError when the engine does not start."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        self._stopping = False
        self._standstill = Standstill()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        try:
            self.engine = self._wait(_start(engine_args))
            _tell_steps(self.engine, self._standstill.moved)
        except Exception as error:
            self._end_loop()
            raise SetupError(f"vLLM did not start: {error}; its log says more") from error

    @property
    def alive(self) -> bool:
        return not self._stopping and self._thread.is_alive() and not self.engine.errored

    @property
    def stands_still_s(self) -> float:
        """How long vLLM has had requests and drawn nothing."""
        return self._standstill.seconds

    def call(self, method: Callable[[Any], Awaitable[T]]) -> T:
        """Run `method(engine)` on the loop and wait for what it returns. Raises ServerOpError when stopped."""
        return self._result(lambda: self._begin(method(self.engine)))

    def generate(self, method: Callable[[Any], Awaitable[T]], names: Sequence[str], watch: Watch) -> T:
        """As `call`, of a method that runs requests of these names. Once `watch` is aborted vLLM is told to drop them,
        and each ends with what was drawn of it; raises Aborted then."""

        async def run() -> T:
            with self._standstill.call():
                return await method(self.engine)

        def begin() -> Future[T]:
            running = self._begin(run())

            def drop() -> None:
                if not running.done():
                    self._begin(_drop(self.engine, names, running))

            watch.on_abort(drop)
            return running

        result = self._result(begin)
        if watch.aborted:
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
            if self._stopping:  # it was begun while the rest was stopped, and met an engine or a loop that ends
                raise _stopped() from None
            raise

    def stop(self) -> None:
        """Fail whatever is unfinished, then end vLLM's processes and the loop."""
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
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))


def _tell_steps(engine: Any, moved: Callable[[], None]) -> None:
    """Have vLLM call `moved`, in its loop, when it is handed what a step drew: of all its requests, told of or not."""
    processor = engine.output_processor
    process = processor.process_outputs

    def process_and_tell(*args: Any, **named: Any) -> Any:
        moved()
        return process(*args, **named)

    processor.process_outputs = process_and_tell


async def _drop(engine: Any, names: Sequence[str], running: Future[Any]) -> None:
    """Again and again: one that vLLM is just taking in is not known to it yet."""
    while not running.done():
        await engine.abort(names)
        await asyncio.sleep(_AGAIN_S)


async def _cancel_tasks() -> None:
    """Let every other task of this loop end, so that nothing is left pending when it closes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
