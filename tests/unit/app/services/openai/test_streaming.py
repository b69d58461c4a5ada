"""Waiting for a sampling request: through outages, and with a time limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis

from app.domain.accounts import Caller
from app.domain.results import PROTOBUF, Result
from app.domain.sampling import SampledSequence, SampleOutput
from app.errors import ClientGone, NotReplicated, OpError, ServerOpError, Unauthorized, Unavailable, UserOpError
from app.services.openai import streaming
from app.services.openai.streaming import PendingSample, ResultStream
from app.stores.redis.completions import TokenChunk
from app.stores.redis.types import Future
from app.wire.results import encode_sample

ME = Caller.alone("me")
ASKED = PendingSample("session:sample:0:1", ME, live=True)
OUTPUT = SampleOutput((SampledSequence(np.array([5, 6], np.int32), np.array([-1, -2], np.float32), True),))
DONE = Result(encode_sample(OUTPUT), PROTOBUF)


class Script:
    """Script of the servers' answers, one per read: an error, a result, tokens, or nothing (None)."""

    def __init__(self, *looks: object) -> None:
        self._looks = list(looks)
        self.seen: list[str] = []

    def future(self, request_id: str, caller: Caller) -> Future:
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return Future(request_id, "sample", "m", "me", "done", look if isinstance(look, Result) else None)

    def read(self, request_id: str, after: str) -> tuple[list[TokenChunk], str]:
        self.seen.append(after)
        look = self._looks[0]
        if not isinstance(look, list):
            return [], after
        self._looks.pop(0)
        return look, f"{len(self.seen)}-0"

    def wait(self, request_id: str, timeout_s: float, check: Callable[[], bool]) -> None:
        check()


class Clock:
    """A clock that returns each of `times` in turn, and 0 after them. Sleeps return at once."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def monotonic(self) -> float:
        return self.times.pop(0) if self.times else 0.0

    def sleep(self, seconds: float) -> None:
        pass


class WithoutBroker(Script):
    def read(self, request_id: str, after: str) -> tuple[list[TokenChunk], str]:
        raise redis.ConnectionError("away")


def drawn(*tokens: int) -> list[TokenChunk]:
    return [TokenChunk(ASKED.request_id, 0, 0, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))]


def result_stream(
    script: Script,
    asked: PendingSample = ASKED,
    beat: Callable[[Caller], None] = lambda _: None,
    gone: bool = False,
    check_key: Callable[[Caller], None] = lambda _: None,
) -> Iterator[TokenChunk | SampleOutput]:
    return ResultStream(script, script, script, check_key, beat, lambda *_: None)(asked, lambda: gone)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the clock of the result stream alone: other threads of this process read the real one."""
    clock = Clock()
    monkeypatch.setattr(streaming, "time", clock)
    return clock


def test_tokens_come_in_order_and_the_output_last():
    script = Script(drawn(5), drawn(6), DONE)
    *pieces, output = result_stream(script)
    assert [piece.tokens.tolist() for piece in pieces] == [[5], [6]]
    assert isinstance(output, SampleOutput) and output.sequences[0].tokens.tolist() == [5, 6]
    assert script.seen == ["0-0", "1-0", "2-0"], "it goes on from what it has"


def test_a_request_that_is_not_live_has_no_stream_to_read():
    script = Script(None, DONE)
    assert len(list(result_stream(script, PendingSample(ASKED.request_id, ME, live=False)))) == 1
    assert script.seen == []


def test_an_outage_is_waited_for():
    outages = [redis.ConnectionError("away"), redis.BusyLoadingError("loading")]
    assert len(list(result_stream(Script(*outages, drawn(5), redis.ConnectionError("again"), DONE)))) == 2


def test_a_result_that_replicas_lack_or_the_object_store_holds_back_is_waited_for():
    """The client would ask again, and its answer would be sampled and charged a second time."""
    held_back = [NotReplicated("fewer than 1 replicas have it"), Unavailable("the object store is away")]
    assert len(list(result_stream(Script(drawn(5), *held_back, DONE)))) == 2


def test_a_broker_that_is_away_holds_up_no_result():
    assert len(list(result_stream(WithoutBroker(None, None, DONE)))) == 1


def test_another_error_is_not():
    with pytest.raises(redis.ResponseError):
        list(result_stream(Script(redis.ResponseError("WRONGTYPE"))))


@pytest.mark.parametrize(("category", "kind"), [("user", UserOpError), ("server", ServerOpError)])
def test_a_failed_request_fails_with_its_words(category: str, kind: type[OpError]):
    failed = Result(json.dumps({"error": "so", "category": category}).encode(), failed=True)
    with pytest.raises(kind, match="so"):
        list(result_stream(Script(failed)))


def test_a_client_that_went_away_is_not_waited_for():
    with pytest.raises(ClientGone):
        list(result_stream(Script(None, None), gone=True))


def test_silence_has_an_end_and_tokens_put_it_off(clock: Clock):
    clock.times = [0.0, 599.0, 1190.0, 1200.0]
    script = Script(drawn(5), None, None, None, None)
    waited = result_stream(script)
    assert isinstance(next(waited), TokenChunk)
    with pytest.raises(Unavailable, match="600 s"):
        next(waited)
    assert len(script.seen) == 1 + 2 * 2, "it looked until 1,200 s, twice a turn"


def test_a_request_that_is_not_live_may_be_silent_for_an_hour(clock: Clock):
    quiet = PendingSample(ASKED.request_id, ME, live=False)
    clock.times = [0.0, 601.0, 3600.0]
    (output,) = result_stream(Script(*[None] * 4, DONE), quiet)
    assert isinstance(output, SampleOutput)
    clock.times = [0.0, 3601.0]
    with pytest.raises(Unavailable, match="3600 s"):
        list(result_stream(Script(None, None, DONE), quiet))


def test_a_stream_ends_at_the_next_beat_after_its_key_was_revoked(clock: Clock):
    clock.times = [0.0, 9.0, 11.0]

    def revoked(caller: Caller) -> None:
        assert caller is ME
        raise Unauthorized("this API key was revoked")

    script = Script(None, None, None, None)
    with pytest.raises(Unauthorized, match="revoked"):
        list(result_stream(script, check_key=revoked))
    assert len(script.seen) == 2 * 2, "it looked until 11 s, twice a turn"


@pytest.mark.parametrize("error", [redis.ConnectionError("away"), Unavailable("accounts cannot be looked up")])
def test_an_outage_at_a_beat_does_not_end_a_stream(clock: Clock, error: Exception):
    clock.times = [float(second) for second in range(0, 1000, 4)]

    def away(caller: Caller) -> None:
        raise error

    for check_key, beat in ((away, lambda _: None), (lambda _: None, away)):
        found = list(result_stream(Script(*[None] * 20, DONE), beat=beat, check_key=check_key))
        assert len(found) == 1, "its result"


def test_the_session_is_kept_alive_meanwhile(clock: Clock):
    clock.times = [float(second) for second in range(0, 1000, 4)]
    callers: list[Caller] = []
    list(result_stream(Script(*[None] * 20, DONE), beat=callers.append))
    assert callers == [ME] * 3
