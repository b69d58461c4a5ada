"""Duration of a long poll, by the number of polls already held."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
import redis

from app.domain.accounts import SCOPES, Caller, Role, Scope
from app.domain.records import Sampler
from app.domain.results import Result
from app.errors import NotFound, TooManyRequests, Unauthorized, Unavailable
from app.services.polling import (
    BatchPollService,
    CheckKey,
    FutureFinder,
    LongPollLimiter,
    LongPolls,
    PollService,
    check_request_id,
)
from app.settings import ApiSettings
from app.stores.redis.types import Completion, Future
from app.suspension import SUSPENDED_A_THREAD, Suspension
from app.telemetry import HELD_POLLS

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
        self.watched: dict[str, list[Callable[[], None]]] = {}

    def wait(self, request_id: str, timeout_s: float, check: Callable[[], bool]) -> None:
        if check():
            return
        self.holds.append(timeout_s)
        self.arrived.release()
        assert self.release.wait(120)

    @contextlib.contextmanager
    def watch(self, request_id: str, wake: Callable[[], None]) -> Iterator[None]:
        self.watched.setdefault(request_id, []).append(wake)
        yield
        self.watched[request_id].remove(wake)


def long_polls(waiter: RecordingWaiter, limiter: LongPollLimiter, check_key: CheckKey = is_valid) -> LongPolls:
    return LongPolls(waiter, limiter, limiter, check_key)


def poll_service(futures: FutureFinder, waiter: RecordingWaiter, settings: ApiSettings) -> PollService:
    return PollService(futures, long_polls(waiter, LongPollLimiter(settings)), unnoted)


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
    def find(self, cls: type[Sampler], key: str) -> Sampler:
        return cls("me", "s", "base", 0.0)


@pytest.mark.parametrize(("asked", "held"), [({}, [30.0]), ({"timeout": 2.0}, [2.0]), ({"timeout": 0.0}, [])])
def test_a_batch_poll_is_held_no_longer_than_it_asks_for(
    waiter: RecordingWaiter, asked: dict[str, float], held: list[float]
) -> None:
    waiter.release.set()
    polls = BatchPollService(
        NoCompletions(), OneSampler(), long_polls(waiter, LongPollLimiter(ApiSettings(poll_hold_s=30))), unnoted
    )
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    found = polls.wait(ME, {"target": target, "prev_cursor": 5, "retrieved_request_ids": [], **asked})
    assert (found, waiter.holds) == (([], 5), held)


def test_batch_polls_and_polls_share_one_capacity(waiter: RecordingWaiter) -> None:
    poll_limiter = LongPollLimiter(ApiSettings(poll_capacity=1, spare_threads=8, poll_hold_s=30))
    polls = long_polls(waiter, poll_limiter)
    batch = BatchPollService(NoCompletions(), OneSampler(), polls, unnoted)
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    asked = {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
    held = threading.Thread(target=batch.wait, args=(ME, asked), daemon=True)
    held.start()
    assert waiter.arrived.acquire(timeout=60)
    other = threading.Thread(target=PollService(PendingOpLog(), polls, unnoted).wait, args=("m:1", ME), daemon=True)
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


@pytest.mark.parametrize(
    ("role", "scopes", "noted"),
    [
        ("member", SCOPES, {"m:1"}),
        ("member", {"train"}, {"m:1"}),
        ("member", {"sample"}, {"m:1"}),
        ("member", {"manage"}, set()),
        ("member", (), set()),
        ("viewer", SCOPES, set()),
    ],
)
def test_a_poll_that_waits_is_a_sign_of_life_unless_its_caller_only_looks_on(
    waiter: RecordingWaiter, role: Role, scopes: Iterable[Scope], noted: set[str]
) -> None:
    waiter.release.set()
    seen: list[str] = []
    settings = ApiSettings(poll_hold_s=30)
    polls = PollService(PendingOpLog(), long_polls(waiter, LongPollLimiter(settings)), seen.append)
    polls.wait("m:1", Caller("key", "user", "org", "me", {"me": role}, frozenset(scopes)))
    assert set(seen) == noted


def revoked(caller: Caller) -> None:
    raise Unauthorized("this API key was revoked")


def test_a_poll_that_waited_gets_nothing_once_its_key_is_revoked(waiter: RecordingWaiter) -> None:
    waiter.release.set()
    polls = long_polls(waiter, LongPollLimiter(ApiSettings(poll_hold_s=30)), revoked)
    with pytest.raises(Unauthorized):
        PollService(PendingOpLog(), polls, unnoted).wait("m:1", ME)
    batch = BatchPollService(NoCompletions(), OneSampler(), polls, unnoted)
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    with pytest.raises(Unauthorized):
        batch.wait(ME, {"target": target, "prev_cursor": 0, "retrieved_request_ids": []})


def suspension() -> Suspension:
    return Suspension(lambda suspension: None)


def test_a_suspended_poll_keeps_its_place_until_it_is_over_and_is_woken_by_its_future(waiter: RecordingWaiter) -> None:
    polls = poll_service(PendingOpLog(), waiter, ApiSettings(poll_capacity=1, spare_threads=8, poll_hold_s=30))
    held, other = suspension(), suspension()
    before = HELD_POLLS._value.get()
    assert polls.wait("m:1", ME, held) is None
    assert polls.wait("m:2", ME, other) is None
    assert (held.seconds, other.seconds, HELD_POLLS._value.get() - before) == (30.0, 1.0, 2)
    [wake] = waiter.watched["m:1"]
    wake()
    assert (held.is_resumed, other.is_resumed) == (True, False)
    held.end()
    assert (waiter.watched["m:1"], HELD_POLLS._value.get() - before) == ([], 1)
    assert polls.wait("m:1", ME, held).result is None, "the second call answers in any case"
    other.end()
    again = suspension()
    polls.wait("m:3", ME, again)
    assert again.seconds == 30.0, "room is given back"
    assert waiter.holds == [], "no thread waited"


def test_a_suspended_poll_is_a_sign_of_its_client_once(waiter: RecordingWaiter) -> None:
    seen: list[str] = []
    polls = PollService(PendingOpLog(), long_polls(waiter, LongPollLimiter(ApiSettings())), seen.append)
    held = suspension()
    polls.wait("m:1", ME, held)
    assert seen == ["m:1"]
    held.end()
    polls.wait("m:1", ME, held)
    assert seen == ["m:1"]


def test_a_poll_whose_future_is_done_or_that_may_not_wait_is_not_suspended(waiter: RecordingWaiter) -> None:
    class DoneOpLog:
        def future(self, request_id: str, caller: Caller) -> Future:
            return Future(request_id, "sample", "m", "me", "done", Result(b"x"))

    done = suspension()
    found = poll_service(DoneOpLog(), waiter, ApiSettings()).wait("m:1", ME, done)
    assert (found.result, done.is_suspended, waiter.watched) == (Result(b"x"), False, {"m:1": []})
    impatient = suspension()
    polls = long_polls(waiter, LongPollLimiter(ApiSettings()))
    batch = BatchPollService(NoCompletions(), OneSampler(), polls, unnoted)
    target = {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 0}
    asked = {"target": target, "prev_cursor": 5, "retrieved_request_ids": [], "timeout": 0.0}
    assert (batch.wait(ME, asked, impatient), impatient.is_suspended) == (([], 5), False)
    assert batch.wait(ME, {**asked, "timeout": 2.0}, impatient) is None
    assert impatient.seconds == 2.0
    impatient.end()


def test_suspended_polls_do_not_take_the_places_of_those_in_threads_and_have_five_for_each(
    waiter: RecordingWaiter,
) -> None:
    settings = ApiSettings(poll_capacity=2, spare_threads=8, poll_hold_s=30)
    in_threads = LongPollLimiter(settings)
    polls = PollService(
        PendingOpLog(), LongPolls(waiter, in_threads, LongPollLimiter(settings, SUSPENDED_A_THREAD), is_valid), unnoted
    )
    held = [suspension() for _ in range(11)]
    for number, each in enumerate(held):
        polls.wait(f"m:{number}", ME, each)
    assert [each.seconds for each in held] == [30.0] * 10 + [1.0]
    with in_threads.occupy("me"), in_threads.occupy("me"):
        pass
    for each in held:
        each.end()
