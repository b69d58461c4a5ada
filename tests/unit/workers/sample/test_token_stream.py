"""Tokens on their way out of a sampler: in order, in few messages, and without delay for the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import redis

from app.stores.redis import keys
from app.stores.redis.completions import TokenChunk, TokenStreams
from tests.unit.workers.conftest import await_true
from workers.sample.token_stream import TokenPublisher, joined


def tokens(drawn: Iterable[TokenChunk], request_id: str, index: int) -> list[int]:
    """Tokens of one sample, each with its index."""
    found: dict[int, int] = {}
    for piece in drawn:
        if (piece.request_id, piece.index) == (request_id, index):
            found.update(enumerate(piece.tokens.tolist(), piece.position))
    assert list(found) == list(range(len(found)))
    return list(found.values())


def test_what_was_drawn_can_be_read_in_order_and_from_where_one_left_off(client: redis.Redis):
    streams = TokenStreams(client)
    publisher = TokenPublisher(streams)
    report = publisher.callback("a:1")
    for token in range(50):
        report(0, [token], [-0.5])
        report(1, [token + 100, token + 101], [-0.5, -1.0])
    first, last = [], "0-0"
    while len(tokens(first, "a:1", 1)) < 100:
        drawn, last = streams.read("a:1", last)
        first += drawn
    assert tokens(first, "a:1", 0) == list(range(50))
    assert np.concatenate([piece.logprobs for piece in first if piece.index == 1]).tolist() == [-0.5, -1.0] * 50
    report(0, [50], [-2.0])
    await_true(lambda: streams.read("a:1", last)[0], "the token that came last")
    ((rest,), _) = streams.read("a:1", last)
    assert (rest.position, rest.tokens.tolist(), rest.logprobs.tolist()) == (50, [50], [-2.0])
    publisher.close()


def test_a_reader_is_woken_and_the_stream_goes_away_by_itself(client: redis.Redis):
    publisher = TokenPublisher(TokenStreams(client))
    with client.pubsub() as channel:
        channel.subscribe(keys.DONE_CHANNEL)
        assert channel.get_message(timeout=60)["type"] == "subscribe"
        publisher.callback("a:1")(0, [1], [-1.0])
        notifications = (message["data"] for message in channel.listen() if message["type"] == "message")
        assert next(notifications) == b"a:1"
    assert client.ttl(keys.stream("a:1")) > 0
    publisher.close()


def test_what_waits_is_sent_before_the_end(client: redis.Redis):
    streams = TokenStreams(client)
    publisher = TokenPublisher(streams)
    publisher.callback("a:1")(0, [1, 2], [-1.0, -1.0])
    publisher.close()
    assert tokens(streams.read("a:1", "0-0")[0], "a:1", 0) == [1, 2]


class HangingStreams(TokenStreams):
    """A state server that hangs, then fails once, then works."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.called, self.release, self.failures = threading.Event(), threading.Event(), 1

    def add(self, drawn: Iterable[TokenChunk]) -> None:
        self.called.set()
        assert self.release.wait(30)
        if self.failures:
            self.failures -= 1
            raise redis.ConnectionError("away")
        super().add(drawn)


def test_a_state_server_that_hangs_or_fails_keeps_no_engine_waiting_and_ends_no_stream(client: redis.Redis, caplog):
    streams = HangingStreams(client)
    publisher = TokenPublisher(streams)
    report = publisher.callback("a:1")
    report(0, [1], [-1.0])
    assert streams.called.wait(30)
    for token in range(65_540):  # more than the stream keeps
        report(0, [token], [-1.0])
    assert [record.name for record in caplog.records].count("workers.sample.token_stream") == 1
    streams.release.set()
    await_true(lambda: streams.read("a:1", "0-0")[0], "what was kept, behind what failed")
    publisher.callback("a:2")(0, [5], [-1.0])
    await_true(lambda: streams.read("a:2", "0-0")[0], "the next request's token")
    publisher.close()


def test_only_what_follows_each_other_becomes_one_piece():
    def drawn(place: int, *ids: int, index: int = 0) -> TokenChunk:
        return TokenChunk("a:1", index, place, np.array(ids, np.int32), np.zeros(len(ids), np.float32))

    pieces = joined([drawn(0, 1), drawn(0, 9, index=1), drawn(1, 2, 3), drawn(5, 6), drawn(0, 1), drawn(1, 2)])
    assert [(piece.index, piece.position, piece.tokens.tolist()) for piece in pieces] == [
        (0, 0, [1, 2, 3]),
        (1, 0, [9]),
        (0, 5, [6]),
        (0, 0, [1, 2]),
    ]
