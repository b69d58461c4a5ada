"""Duration of a long poll, by the number of polls already held."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

import pytest
import redis

from app.domain.accounts import Caller, Role
from app.domain.records import Sampler
from app.domain.results import Result
from app.errors import NotFound, TooManyRequests, Unauthorized, Unavailable
from app.services.polling import BatchPollService, FutureFinder, LongPollLimiter, PollService, check_request_id
from app.settings import ApiSettings
from app.stores.redis.records import dump
from app.stores.redis.types import Completion, Future

ME = Caller.alone("me")


class PendingOpLog:
    def future(self, request_id: str, caller: Caller) -> Future:
        return Future(request_id, "sample", "m", "me", "pending", None)


def is_valid(caller: Caller) -> None:
    """The check of a key that stays valid."""


def unnoted(request_id: str) -> None:
    """A poll that nobody takes for a sign of life."""


class RecordingWaiter:
    """Holds every poll until released, and records its hold."""

    def __init__(self) -> None:
        self.holds: list[float] = []
        self.release = threading.Event()
        self.arrived = threading.Semaphore(0)

    def wait(self, request_id: str, timeout_s: float, check: Callable[[], bool]) -> None:
        if check():
            return
        self.holds.append(timeout_s)
        self.arrived.release()
        assert self.release.wait(120)


def poll_service(futures: FutureFinder, waiter: RecordingWaiter, settings: ApiSettings) -> PollService:
    return PollService(futures, waiter, LongPollLimiter(settings), is_valid, unnoted)


@pytest.fixture
def waiter() -> RecordingWaiter:
    return RecordingWaiter()


@pytest.mark.parametrize("text", ["m:train:0:\u0663", "m:train:0:1\n", "m:train:0:", ":1"])
def test_an_id_ends_in_a_number_of_ascii_digits(text: str) -> None:
    check_request_id("m:train:0:3")
    with pytest.raises(NotFound):
        check_request_id(text)


def test_above_capacity_holds_get_shorter_and_half_the_spare_threads_stay_free(waiter: RecordingWaiter) -> None:
    polls = poll_service(PendingOpLog(), waiter, ApiSettings(poll_capacity=3, spare_threads=8, poll_hold_s=30))
    threads = [threading.Thread(target=polls.wait, args=(f"m:{i}", ME), daemon=True) for i in range(7)]
    for thread in threads:
        thread.start()
        assert waiter.arrived.acquire(timeout=60)
    assert waiter.holds == [30.0] * 3 + [1.0] * 4
    assert polls.wait("m:8", ME).result is None, "answered at once, not refused"
    assert len(waiter.holds) == 7
    waiter.release.set()
    for thread in threads:
        thread.join(60)
    polls.wait("m:9", ME)
    assert waiter.holds[-1] == 30.0, "room is given back"


def test_a_finished_future_is_answered_without_waiting(waiter: RecordingWaiter) -> None:
    class DoneOpLog:
        def future(self, request_id: str, caller: Caller) -> Future:
            return Future(request_id, "sample", "m", "me", "done", Result(b"x"))

    future = poll_service(DoneOpLog(), waiter, ApiSettings()).wait("m:1", ME)
    assert future.result == Result(b"x")
    assert waiter.holds == []


OUTAGES = [
    redis.ConnectionError("away"),
    redis.BusyLoadingError("Valkey is loading the dataset in memory"),
    redis.ReadOnlyError("You can't write against a read only replica."),
    redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
    Unavailable("the object store is away"),
]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: type(outage).__name__)
def test_a_poll_in_an_outage_is_held_a_moment_since_the_sdk_asks_again_at_once(
    waiter: RecordingWaiter, outage: Exception
) -> None:
    class AwayOpLog:
        def future(self, request_id: str, caller: Caller) -> Future:
            raise outage

    started = time.monotonic()
    with pytest.raises(type(outage)):
        poll_service(AwayOpLog(), waiter, ApiSettings(poll_hold_s=0.5)).wait("m:1", ME)
    assert time.monotonic() - started >= 0.5


class NoCompletions:
    """Completions that never come."""

    def since(self, target: str, cursor: int) -> tuple[list[Completion], int]:
        return [], cursor

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        list(request_ids)


class OneSampler:
    def get(self, namespace: str, key: str) -> dict[str, str]:
        return dump(Sampler("me", "s", "base", 0.0))


@pytest.mark.parametrize(("asked", "held"), [({}, [30.0]), ({"timeout": 2.0}, [2.0]), ({"timeout": 0.0}, [])])
def test_a_batch_poll_is_held_no_longer_than_it_asks_for(
    waiter: RecordingWaiter, asked: dict[str, float], held: list[float]
) -> None:
    waiter.release.set()
    polls = BatchPollService(
        NoCompletions(), OneSampler(), waiter, LongPollLimiter(ApiSettings(poll_hold_s=30)), is_valid, unnoted
    )
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    found = polls.wait(ME, {"target": target, "prev_cursor": 5, "retrieved_request_ids": [], **asked})
    assert (found, waiter.holds) == (([], 5), held)


def test_batch_polls_and_polls_share_one_capacity(waiter: RecordingWaiter) -> None:
    poll_limiter = LongPollLimiter(ApiSettings(poll_capacity=1, spare_threads=8, poll_hold_s=30))
    batch = BatchPollService(NoCompletions(), OneSampler(), waiter, poll_limiter, is_valid, unnoted)
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    asked = {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
    held = threading.Thread(target=batch.wait, args=(ME, asked), daemon=True)
    held.start()
    assert waiter.arrived.acquire(timeout=60)
    other = threading.Thread(
        target=PollService(PendingOpLog(), waiter, poll_limiter, is_valid, unnoted).wait, args=("m:1", ME), daemon=True
    )
    other.start()
    assert waiter.arrived.acquire(timeout=60)
    waiter.release.set()
    for thread in (held, other):
        thread.join(60)
    assert waiter.holds == [30.0, 1.0]


def test_a_project_within_its_share_is_held_in_full_though_another_filled_the_capacity() -> None:
    limiter = LongPollLimiter(ApiSettings(poll_capacity=8, spare_threads=8, poll_hold_s=30))
    with contextlib.ExitStack() as held:

        def polls(project: str, count: int) -> list[float]:
            return [held.enter_context(limiter.hold(project)) for _ in range(count)]

        assert polls("greedy", 9) == [30.0] * 8 + [1.0]
        with limiter.occupy("other"):
            assert polls("other", 3) == [30.0] * 3
        with pytest.raises(TooManyRequests, match="project greedy has its share"), limiter.occupy("greedy"):
            pass
        assert polls("other", 3) == [30.0, 0.0, 0.0], "its share is 4 of 8"


@pytest.mark.parametrize(("role", "noted"), [("member", ["m:1"]), ("viewer", [])])
def test_a_poll_that_waits_is_a_sign_of_life_unless_its_caller_only_looks_on(
    waiter: RecordingWaiter, role: Role, noted: list[str]
) -> None:
    waiter.release.set()
    seen: list[str] = []
    settings = ApiSettings(poll_hold_s=30)
    polls = PollService(PendingOpLog(), waiter, LongPollLimiter(settings), is_valid, seen.append)
    polls.wait("m:1", Caller("key", "user", "org", "me", {"me": role}))
    assert seen == noted


def revoked(caller: Caller) -> None:
    raise Unauthorized("this API key was revoked")


def test_a_poll_that_waited_gets_nothing_once_its_key_is_revoked(waiter: RecordingWaiter) -> None:
    waiter.release.set()
    settings = ApiSettings(poll_hold_s=30)
    polls = PollService(PendingOpLog(), waiter, LongPollLimiter(settings), revoked, unnoted)
    with pytest.raises(Unauthorized):
        polls.wait("m:1", ME)
    batch = BatchPollService(NoCompletions(), OneSampler(), waiter, LongPollLimiter(settings), revoked, unnoted)
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    with pytest.raises(Unauthorized):
        batch.wait(ME, {"target": target, "prev_cursor": 0, "retrieved_request_ids": []})
