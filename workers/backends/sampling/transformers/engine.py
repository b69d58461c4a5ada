"""The engine of the transformers sampler: the thread that owns the model, and decodes requests together."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from app.errors import ServerOpError
from workers.backends.failures import StallDetector, lost_device, ran_out_of_memory
from workers.backends.sampling.shares import Demand, grant, surplus
from workers.backends.sampling.transformers.batch import RunningBatch, fits, prefill
from workers.backends.sampling.transformers.jobs import Job, Row


class Engine:
    """Continuous batching of at most `max_batch` sequences. `submit` is safe from any thread.

    While several projects want rows, each has its share (shares.py). Sequences of a project above its share are set
    aside, and go on when rows are free. If memory is too small to run a prompt beside the running sequences, the prompt
    waits until one of them ends. If it is too small for sequences to decode together, fewer of them do, until only so
    many are unfinished.
    """

    def __init__(self, model: nn.Module, device: torch.device, max_batch: int) -> None:
        self._model = model
        self._device = device
        self._max_batch = max_batch
        self._batch = RunningBatch(model, device)
        # The most rows that run: fewer than max_batch while memory is too small for more.
        self._most = max_batch
        # No job starts until fewer sequences than this are unfinished, or the refused job, for which memory was too
        # small, has ended.
        self._full_at = math.inf
        self._refused: Job | None = None
        self._waiting: deque[Job] = deque()
        self._unfinished: set[Job] = set()
        self._for_idle: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stall_detector = StallDetector()
        # A step of a large model may take long on a CPU; each of its layers shows that it goes on.
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.register_forward_hook(lambda *_: self._stall_detector.progress())
        self._thread = threading.Thread(target=self._run, name="sampler-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds that the engine has had work without running a layer or producing a token."""
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
            if self._fits(self._batch.step):
                self._fits(self._batch.compact)
            else:
                self._make_room(self._batch.live)
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
        if self._sequences() < self._full_at or (self._refused is not None and self._refused.future.done()):
            self._full_at, self._refused, self._most = math.inf, None, self._max_batch
        while demands := self._demands():
            if not self._full and (taken := surplus(demands, self._max_batch)):
                if not self._fits(self._batch.set_aside, taken):
                    self._limit(len(self._batch.live))
                demands = self._demands()
            granted = grant(demands, self._most)
            resumed = self._batch.choose(granted)
            if resumed:
                self._join(resumed)
            starting = [] if self._full else self._next(granted - Counter(row.job.handle.project for row in resumed))
            if starting:
                self._start(starting)
                self._stall_detector.progress()
            elif not resumed:
                return

    @property
    def _full(self) -> bool:
        """True while memory is too small for more rows."""
        return self._full_at < math.inf

    def _sequences(self) -> int:
        """Returns the number of unfinished sequences, running or set aside."""
        return len(self._batch.live) + len(self._batch.aside)

    def _demands(self) -> dict[str, Demand]:
        """Returns the rows that each project has and wants, in the order of their oldest waiting job; nothing while no
        project waits. A job that ended midway leaves the queue."""
        with self._changed:
            self._waiting = deque(job for job in self._waiting if not job.future.done())
            waiting = [] if self._full else list(self._waiting)
        aside = self._batch.aside
        if not (waiting or aside):
            return {}
        running, wanted, weights = Counter[str](), Counter[str](), dict[str, float]()
        for handle, count in [(row.job.handle, 1) for row in aside] + [(job.handle, job.unstarted) for job in waiting]:
            wanted[handle.project] += count
            weights[handle.project] = handle.weight
        for row in self._batch.live:
            running[row.job.handle.project] += 1
            weights.setdefault(row.job.handle.project, row.job.handle.weight)
        return {project: Demand(weights[project], running[project], wanted[project]) for project in weights}

    def _next(self, granted: Counter[str]) -> list[tuple[Job, int]]:
        """Returns jobs that share a pass over their prompts, the oldest first, with a sample count for each: as many
        rows of each project as are granted.

        A job with more samples than that stays in the queue; its prompt runs again when rows are free.
        """
        starting: list[tuple[Job, int]] = []
        with self._changed:
            for job in list(self._waiting):
                project = job.handle.project
                count = min(granted[project], job.unstarted)
                if not count:
                    continue
                if not fits([one for one, _ in starting], job):
                    break
                starting.append((job, count))
                granted[project] -= count
                if count == job.unstarted:
                    self._waiting.remove(job)
        return starting

    def _start(self, starting: list[tuple[Job, int]]) -> None:
        """Starts jobs in one pass. If it fails, each runs alone, so that the failing prompt fails no other."""
        try:
            begun = self._begin(starting)
        except Exception as error:
            if lost_device(error):  # not the request's fault
                raise
            if len(starting) == 1:
                self._fail_or_put_back(starting[0][0], error)
                return
        else:
            self._join(begun)
            return
        # Not in the `except` block: there the error would keep the tensors of the failed pass.
        for place, entry in enumerate(starting):
            self._start([entry])
            if self._full:
                self._put_back([job for job, _ in starting[place:] if job.unstarted])
                return

    def _begin(self, starting: list[tuple[Job, int]]) -> list[Row]:
        by_adapter = sorted(starting, key=lambda entry: entry[0].adapter_id)
        return self._batch.begin(by_adapter, prefill(self._model, self._device, [job for job, _ in by_adapter]))

    def _fail_or_put_back(self, job: Job, error: Exception) -> None:
        if ran_out_of_memory(error) and self._batch.occupied:
            self._put_back([job])
            self._full_at, self._refused = max(1, self._sequences()), job
        else:
            job.fail(error)

    def _join(self, rows: list[Row]) -> None:
        """Takes rows that are set aside into the batch, or leaves them there if memory is too small."""
        if self._fits(self._batch.join, rows):
            return
        if running := len(self._batch.live):
            self._batch.drop_columns(rows)
            self._limit(running)
        else:
            self._make_room(rows)

    def _make_room(self, tried: list[Row]) -> None:
        """Frees all columns, and lets half of the rows that were tried go on. Fails a row that had the memory alone."""
        others = [row for row in self._batch.with_columns if row not in tried]
        self._batch.clear()
        if len(tried) == 1 and not others:
            row = tried[0]
            row.job.fail(
                ServerOpError(
                    f"memory ran out for a sequence of {row.cached + 1} tokens, though no other was in memory; send a "
                    "shorter prompt, or ask for fewer tokens"
                )
            )
        else:
            self._limit(len(tried) // 2)

    def _limit(self, most: int) -> None:
        """Lets at most so many rows run, and no job start, until one has ended and only so many are unfinished. One row
        may always run: with none, no row would ever end."""
        self._most, self._refused = max(1, most), None
        self._full_at = max(1, min(self._sequences(), self._most + 1))

    def _fits(self, work: Callable[..., object], *args: object) -> bool:
        """Runs `work`. Returns False, and keeps no tensor of it, when memory is too small."""
        try:
            work(*args)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return False
        return True

    def _put_back(self, jobs: list[Job]) -> None:
        """Puts jobs in front of all that wait."""
        with self._changed:
            self._waiting = deque([*jobs, *(job for job in self._waiting if job not in jobs)])

    def _fail_all(self) -> None:
        with self._changed:
            jobs, unworked = list(self._unfinished), list(self._for_idle)
        error = ServerOpError(f"the sampler has stopped: {self._failure}")
        for job in jobs:
            job.fail(error)
        for _, done in unworked:
            done.set_exception(error)
