"""Runs and cancels sampling requests. The adapter is immutable and the seed is given, so any worker can run a request
again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import redis

from app import ids
from app.domain import ops
from app.domain.records import Sampler
from app.domain.results import CACHED, DEVICE, NOTHING, PREFILLED, PROTOBUF, SAMPLED, Result, Usage
from app.domain.routes import SequenceRoutes
from app.domain.sampling import SampleOutput
from app.errors import Fenced, OpError, Requeue, ServerOpError, TriedOften, Unavailable
from app.stores.objects.routes import RouteFiles, StoredRoutes
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Entry
from app.wire import results
from app.wire.results import encode_sample
from workers.backends.sampling.base import Aborted, RequestHandle, SamplerBackend
from workers.process import telemetry
from workers.process.liveness import LeaseKeeper
from workers.sample.adapters import Adapters
from workers.sample.admission import BatchAdmission, ThrottledDispatch
from workers.sample.device_time import DeviceClock
from workers.sample.token_stream import TokenPublisher

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3


class _Outcome(NamedTuple):
    """The outcome of an attempt: its result, the usage it counts, and the routes that it stored."""

    result: Result
    usage: Usage = NOTHING
    routes: StoredRoutes | None = None


class SampleRunner:
    """Runs sampling requests. `handle` blocks until the sample is ready; each future is handled in its own thread.

    Aborting a request's handle stops the request: when it was cancelled, or when its lease was lost.

    When a worker dies, every request that it had begun loses one attempt, also those that did not cause the death. So a
    worker never runs two requests in their last attempt at once: the request that kills workers ends as failed, and the
    others do not fail with it.

    `gpu_turn` waits until the sampler may use its GPUs, as long as its block. A request's device time
    begins after the wait.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        records: RedisRecords,
        backend: SamplerBackend,
        adapters: Adapters,
        keeper: LeaseKeeper,
        worker: str,
        running_requests: RunningRequests,
        publisher: TokenPublisher,
        batch_admission: BatchAdmission,
        throttled: ThrottledDispatch,
        route_files: RouteFiles,
        device_clock: DeviceClock,
        gpu_turn: Callable[[RequestHandle], AbstractContextManager[object]],
    ) -> None:
        self._device_clock, self._gpu_turn = device_clock, gpu_turn
        self._oplog, self._records, self._backend, self._publisher = oplog, records, backend, publisher
        self._batch_admission, self._throttled, self._route_files = batch_admission, throttled, route_files
        self._adapters, self._keeper, self._worker, self._running_requests = adapters, keeper, worker, running_requests
        self._awaiting_last_attempt: dict[str, str] = {}  # request id -> sampling session; the oldest first
        self._last_attempt = threading.Lock()
        self._ending = False

    def handle(self, request_id: str, sampling_session_id: str, kind: str) -> Result | None:
        """Returns the future's result; None when the future no longer exists.

        Raises Requeue while it runs here or in another worker, while others are at their last attempt before it, while
        a worker that tried it may only be cut off, or while the object store is away.
        """
        try:
            self._run(request_id, sampling_session_id, MAX_ATTEMPTS - 2)
        except TriedOften:
            self._awaiting_last_attempt[request_id] = sampling_session_id
            self._run_last_attempts()
            if self._oplog.outcome(request_id) is None:
                raise Requeue(f"{request_id} waits for its last attempt") from None
        return self._oplog.outcome(request_id)

    def hand_back(self) -> list[str]:
        """Puts back all requests that run here, at no attempt, for a process that ends before they do. Begins no
        further one. Returns their ids. May be called from any thread. Raises RedisError while the state server is
        away."""
        self._ending = True
        running = self._running_requests.handles()
        for request_id, handle in running.items():
            self._oplog.put_off_sample(request_id, self._worker, _usage(handle))
        return list(running)

    def _run_last_attempts(self) -> None:
        """Runs the last attempts one after another, from any thread. Returns at once while another thread does it."""
        while self._awaiting_last_attempt and self._last_attempt.acquire(blocking=False):
            try:
                if self._awaiting_last_attempt:
                    request_id = next(iter(self._awaiting_last_attempt))
                    self._run(request_id, self._awaiting_last_attempt.pop(request_id))
            except Requeue as reason:
                log.info("a request waits before its last attempt: %s", reason)
            finally:
                self._last_attempt.release()

    def _run(self, request_id: str, sampling_session_id: str, most_attempts: int | None = None) -> None:
        if self._ending:
            raise Requeue(f"{request_id}: this process is about to end")
        if not self._backend.healthy():  # a request begun now would lose an attempt for nothing
            raise Requeue(f"{request_id}: the engine has died, and this process is about to end")
        # Register the handle first, so that a cancellation that comes after the claim is not missed.
        with self._running_requests.track(request_id) as handle:
            asked = time.monotonic()
            self._keeper.put_offs.begin(request_id)
            try:
                entry = self._oplog.claim_sample(request_id, self._worker, most_attempts)
            except (Fenced, Unavailable) as reason:
                raise Requeue(str(reason)) from None
            if entry is not None:
                self._keeper.add(request_id, asked, handle.abort)
                try:
                    self._finish(entry, sampling_session_id, handle)
                except (Aborted, Unavailable) as reason:
                    self._leave(request_id, reason, handle)
                except (redis.RedisError, OSError) as error:
                    self._put_off(request_id, handle)
                    telemetry.op_retried(request_id, "sample", type(error).__name__)
                    raise
                finally:
                    self._keeper.drop(request_id)
                    self._throttled.dispatch_next()

    def _leave(self, request_id: str, reason: Exception, handle: RequestHandle) -> None:
        """Gives up a request that was cancelled, belongs to another worker, or runs later. Raises Requeue unless it was
        cancelled."""
        log.info("sample stopped: %s", reason, extra={"request_id": request_id})
        self._put_off(request_id, handle)
        if not self._ended_elsewhere(request_id):
            telemetry.op_retried(request_id, "sample", type(reason).__name__)
            raise Requeue(f"{request_id}: {reason}")

    def _ended_elsewhere(self, request_id: str) -> bool:
        """True for a request that was cancelled, or that another worker finished first; its end is reported by the
        maintenance leader, or by that worker."""
        if self._oplog.outcome(request_id) is None:
            return False
        telemetry.op_abandoned(request_id, "the call was cancelled, or another worker was faster")
        return True

    def _put_off(self, request_id: str, handle: RequestHandle) -> None:
        put_back = partial(self._oplog.put_off_sample, request_id, self._worker, _usage(handle))
        self._keeper.put_offs.add(request_id, put_back)

    def _finish(self, entry: Entry, sampling_session_id: str, handle: RequestHandle) -> None:
        started = time.monotonic()
        result, usage, routes = self._attempt(entry, sampling_session_id, handle)
        ran = time.monotonic()
        if not self._oplog.finish_sample(entry.request_id, result, usage, routes):
            # It was cancelled just before, or another worker was faster.
            self._put_off(entry.request_id, handle)
            if routes is not None:
                self._route_files.remove(routes)
            self._ended_elsewhere(entry.request_id)
            return
        telemetry.op_done(entry, failed=result.failed, run_s=ran - started, commit_s=time.monotonic() - ran)

    def _attempt(self, entry: Entry, sampling_session_id: str, handle: RequestHandle) -> _Outcome:
        if entry.attempts >= MAX_ATTEMPTS:
            if entry.in_doubt:
                raise Unavailable("a worker that tried this request may still answer")
            telemetry.GIVEN_UP.labels(entry.kind).inc()
            why = f"sampling did not finish in {MAX_ATTEMPTS} attempts and was given up"
            return _Outcome(results.of_error(ServerOpError(why)))
        try:
            return self._sample(entry, sampling_session_id, handle)
        except (Aborted, Unavailable, redis.RedisError, OSError):
            raise
        except Exception as error:
            if not self._backend.healthy():
                # The engine died during the request: this process is about to end, and another one runs the request
                # again.
                telemetry.op_abandoned(entry.request_id, "the engine has died")
                raise Requeue(f"{entry.request_id}: {error}") from None
            return _Outcome(results.of_error(_op_error(entry, error)))

    def _sample(self, entry: Entry, sampling_session_id: str, handle: RequestHandle) -> _Outcome:
        sampler = self._records.find(Sampler, sampling_session_id)
        if sampler is None:
            raise ServerOpError(f"sampling session {sampling_session_id} no longer exists; create a new one")
        if not entry.payload:
            raise ServerOpError("the request is lost, because its object in the object store is gone; send it again")
        request = ops.decode(entry.payload)
        if request.stream:
            handle.on_tokens = self._publisher.callback(entry.request_id)
        telemetry.op_started(entry, sampler.owner)
        pinned = sampler.prefix if entry.adapter is None else entry.adapter
        adapter = self._adapters.use(pinned, sampler.owner, handle)
        slot = self._batch_admission.slot(sampler.owner, request, handle)
        with adapter as adapter_id, slot, self._gpu_turn(handle), self._device_clock.share(request.num_samples, handle):
            handle.prompt_tokens = len(request.prompt)
            output = self._backend.sample(adapter_id, request, handle)
        routes = self._keep_routes(entry.request_id, request.prompt, output)
        handle.cached_tokens = output.cached_tokens
        handle.sampled_tokens = sum(len(sequence.tokens) for sequence in output.sequences)
        prefilled = handle.prompt_tokens - handle.cached_tokens
        uses = {"prompt": handle.prompt_tokens, "prefilled": prefilled, "cached": handle.cached_tokens}
        for use, tokens in (uses | {"sampled": handle.sampled_tokens}).items():
            telemetry.TOKENS.labels(use).inc(tokens)
        return _Outcome(Result(encode_sample(output), PROTOBUF), _usage(handle), routes)

    def _keep_routes(self, request_id: str, prompt: np.ndarray, output: SampleOutput) -> StoredRoutes | None:
        """Stores the routes, if the engine recorded any, before the result can be read."""
        routes = {
            ids.sequence_id(request_id, index): SequenceRoutes(
                prompt, output.prompt_routes, sequence.tokens, sequence.routes
            )
            for index, sequence in enumerate(output.sequences)
            if output.prompt_routes is not None and sequence.routes is not None
        }
        return self._route_files.add(routes) if routes else None


def _op_error(entry: Entry, error: Exception) -> OpError:
    """The error that the client receives. An unexpected error also ends the request: another try would fail in the same
    way, and as the worker survives, no attempt would be the last."""
    if isinstance(error, OpError):
        return error
    log.error("sampling failed", exc_info=error, extra={"request_id": entry.request_id})
    return ServerOpError(f"sampling failed: {type(error).__name__}; see the sampler's log")


def _usage(handle: RequestHandle) -> Usage:
    """The usage of a request so far, whether it ended or was stopped."""
    amounts = {
        PREFILLED: handle.prompt_tokens - handle.cached_tokens,
        CACHED: handle.cached_tokens,
        SAMPLED: handle.sampled_tokens,
        DEVICE: handle.device_ms,
    }
    return {kind: amount for kind, amount in amounts.items() if amount}


class RunningRequests:
    """Cancellation of running requests. `abort` may come from any thread, for any request of any worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, RequestHandle] = {}

    @contextmanager
    def track(self, request_id: str) -> Iterator[RequestHandle]:
        """Yields a handle that is aborted if the request is cancelled while the block runs.

        Raises Requeue while an earlier attempt runs here, even one that has lost its lease: a lease names only the
        worker, so the earlier attempt would end the lease of the new one.
        """
        handle = RequestHandle()
        with self._lock:
            if self._running.setdefault(request_id, handle) is not handle:
                raise Requeue(f"{request_id}: an earlier attempt still runs here")
        try:
            yield handle
        finally:
            with self._lock:
                del self._running[request_id]

    def handles(self) -> dict[str, RequestHandle]:
        """The requests that run here, with their handles."""
        with self._lock:
            return dict(self._running)

    def abort(self, request_id: str) -> None:
        """Stops the request, if it runs here."""
        with self._lock:
            handle = self._running.get(request_id)
        if handle is not None:
            handle.abort()
