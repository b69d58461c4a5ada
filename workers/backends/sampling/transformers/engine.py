"""The thread that owns the model: it admits jobs into the running batch and steps it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import nn

from app.errors import ServerOpError
from workers.backends.failures import StallDetector
from workers.backends.sampling.transformers.batch import Job, RunningBatch, fits, prefill


class Engine:
    """Continuous batching of at most `max_batch` sequences. `submit` is safe from any thread."""

    def __init__(self, model: nn.Module, device: torch.device, max_batch: int) -> None:
        self._model = model
        self._device = device
        self._max_batch = max_batch
        self._batch = RunningBatch(model, device)
        self._waiting: deque[Job] = deque()
        self._unfinished: set[Job] = set()
        self._for_idle: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stall_detector = StallDetector()
        self._thread = threading.Thread(target=self._run, name="sampler-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds that the engine has had work without producing a token."""
        return self._stall_detector.seconds

    def submit(self, job: Job) -> None:
        """Queues a job; its future resolves later. Raises ServerOpError once the engine has stopped."""
        with self._changed:
            self._check_alive()
            self._unfinished.add(job)
            self._waiting.append(job)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._unfinished.discard(job))

    def when_idle(self, work: Callable[[], None]) -> None:
        """Runs `work` in the engine's thread once no sequence runs or waits, and returns when it is done.

        An error in `work` ends the engine, because the model's state is then unknown. Raises ServerOpError then.
        """
        done: Future[None] = Future()
        with self._changed:
            self._check_alive()
            self._for_idle.append((work, done))
            self._changed.notify()
        done.result()

    def stop(self) -> None:
        """Fails all unfinished jobs and ends the thread."""
        with self._changed:
            self._failure = self._failure or ServerOpError("the worker is shutting down")
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._has_work():
                    with self._stall_detector.call():
                        self._step()
        except BaseException as error:
            self._failure = error
        self._fail_all()

    def _step(self) -> None:
        self._admit()
        if self._batch.occupied:
            self._batch.step()
        elif self._for_idle:
            self._work_idle()

    def _has_work(self) -> bool:
        """Waits for work; returns False when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._waiting or self._batch.occupied or self._for_idle)
            return self._failure is None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ServerOpError(f"the sampler has stopped: {self._failure}")

    def _work_idle(self) -> None:
        work, done = self._for_idle[0]
        work()
        self._for_idle.popleft()
        done.set_result(None)

    def _admit(self) -> None:
        while starting := self._next():
            self._start(starting)
            self._stall_detector.progress()

    def _next(self) -> list[tuple[Job, int]]:
        """Returns jobs from the head of the queue that share a pass over their prompts, with a sample count for each.

        A job with more samples than free rows stays at the head; its prompt runs again when rows are free.
        """
        free = self._max_batch - self._batch.live
        starting: list[tuple[Job, int]] = []
        with self._changed:
            while free and self._waiting and fits([job for job, _ in starting], self._waiting[0]):
                job = self._waiting[0]
                count = min(free, job.unstarted)
                if not job.future.done():  # a job that failed midway leaves the rest of its samples here
                    starting.append((job, count))
                    free -= count
                    if count < job.unstarted:
                        break
                self._waiting.popleft()
        return sorted(starting, key=lambda entry: entry[0].adapter_id)

    def _start(self, starting: list[tuple[Job, int]]) -> None:
        try:
            prefilled = prefill(self._model, self._device, [job for job, _ in starting])
        except torch.AcceleratorError:  # the device is lost, not the request
            raise
        except Exception as error:
            self._start_alone(starting, error)
        else:
            self._batch.add(starting, prefilled)

    def _start_alone(self, starting: list[tuple[Job, int]], error: Exception) -> None:
        """Runs each prompt alone after a failed pass, so that the failing prompt fails no other."""
        if len(starting) > 1:
            for entry in starting:
                self._start([entry])
            return
        starting[0][0].fail(error)

    def _fail_all(self) -> None:
        with self._changed:
            jobs, unworked = list(self._unfinished), list(self._for_idle)
        error = ServerOpError(f"the sampler has stopped: {self._failure}")
        for job in jobs:
            job.fail(error)
        for _, done in unworked:
            done.set_exception(error)
