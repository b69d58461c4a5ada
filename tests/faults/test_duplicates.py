"""R5: 10,000 admissions, each made one to three times and out of order, by many threads through two clients."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.domain.records import Model
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease

MODELS = 10
OPS = 1000
SAMPLES = 100
THREADS = 8
WINDOW = 8
"""The SDK sends this many calls of a model before the first is answered."""

Call = tuple[str, int]


def shuffled(calls: list[Call], rng: random.Random) -> list[Call]:
    """Repeats each item one to three times, and moves it at most a window away from its place."""
    doubled = [call for call in calls for _ in range(rng.randint(1, 3))]
    order = sorted(range(len(doubled)), key=lambda i: i + rng.uniform(0, WINDOW))
    return [doubled[i] for i in order]


class Scripted:
    """A worker that runs everything it receives, and counts its runs."""

    def __init__(self, oplog: RedisOpLog) -> None:
        self._oplog, self.ran = oplog, Counter[Call]()
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def train(self, models: list[str]) -> None:
        leases = {model: self._oplog.acquire(model, "w/1") for model in models}
        applied = dict.fromkeys(models, -1)
        while any(seq < OPS - 1 for seq in applied.values()) and not self._stop.wait(0.01):
            for model, lease in leases.items():
                assert isinstance(lease, Lease)
                while (entry := self._oplog.next(lease, applied[model] + 1)) is not None:
                    assert entry.payload == content((model, entry.seq))
                    self._oplog.commit(lease, entry.seq, Result(entry.payload))
                    self.ran[model, entry.seq] += 1
                    applied[model] = entry.seq


def content(call: Call) -> bytes:
    return f"{call[0]} {call[1]}".encode()


@pytest.fixture
def clients(valkey: str) -> Iterator[list[RedisOpLog]]:
    with connect(valkey) as one, connect(valkey) as two:
        one.flushall()
        yield [RedisOpLog(client, EngineSettings(lease_s=600)) for client in (one, two)]


@pytest.mark.timeout(900)
def test_each_of_10_000_calls_has_one_future_and_one_effect(clients: list[RedisOpLog]) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    models = [f"session-{i}:train:0" for i in range(MODELS)]
    for model in models:
        assert clients[0].create_model(model, dump(Model("me", "session", "base", 0.0)))
    calls = shuffled([(model, seq) for seq in range(OPS) for model in models], rng)
    worker = Scripted(clients[0])
    training = threading.Thread(target=worker.train, args=(models,))
    training.start()

    def admit(numbered: tuple[int, Call]) -> tuple[str, bool]:
        number, (model, seq) = numbered
        admission = clients[number % 2].admit(model, seq, "k", content((model, seq)), f"{model} {seq}")
        return admission.request_id, admission.fresh

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(admit, enumerate(calls)))
        training.join(600)
    finally:
        worker.stop()
    assert len(answers) > MODELS * OPS * 1.5, "the dose of duplicates"
    assert {request_id for request_id, _ in answers} == {f"{model}:{seq}" for model, seq in calls}
    assert Counter(fresh for _, fresh in answers)[True] == MODELS * OPS
    assert worker.ran == Counter(dict.fromkeys(calls, 1))
    assert clients[1].pending() == []
    for model, seq in rng.sample(calls, SAMPLES):
        assert clients[1].future(f"{model}:{seq}", {"me"}).result == Result(content((model, seq)))
