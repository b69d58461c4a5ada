"""Routes of sampled sequences are found for a day at least, and removed after two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.domain.routes import SequenceRoutes, Span
from app.errors import NotFound
from app.stores.objects.folder import FolderStore
from app.stores.objects.routes import DAY_S, RouteFiles

ID = "session:sample:0:3-1"


class Clock:
    def __init__(self) -> None:
        self.now = 10 * DAY_S + 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path, "secret", "http://x")


@pytest.fixture
def files(store: FolderStore, clock: Clock) -> RouteFiles:
    return RouteFiles(store, clock)


def routes(token: int) -> SequenceRoutes:
    prompt, sample = np.array([1, 2], np.int32), np.array([token, 4, 5], np.int32)
    return SequenceRoutes(prompt, np.ones((2, 3, 2), np.uint8), sample, np.full((2, 3, 2), 7, np.uint8))


def test_the_routes_of_the_attempt_that_counts_are_found_as_they_were(files: RouteFiles, store: FolderStore) -> None:
    first, second = (files.add({ID: routes(token)}) for token in (8, 9))
    for stored, token in ((first, 8), (second, 9)):
        found = files.find(ID, stored.attempt)
        assert (found.sample[0], found.sample_routes.dtype, found.sample_routes.shape) == (token, np.uint8, (2, 3, 2))
        assert stored.size == sum(map(store.size, stored.keys))
    files.remove(first)
    assert files.find(ID, second.attempt).sample[0] == 9
    with pytest.raises(NotFound):
        files.find(ID, first.attempt)


def test_routes_of_an_earlier_version_are_found(files: RouteFiles, clock: Clock, store: FolderStore) -> None:
    store.put_new(f"routes/10/{ID}", routes(8).encode())
    assert files.find(ID, None).sample[0] == 8
    clock.now += DAY_S
    assert files.find(ID, None).sample[0] == 8
    store.put_new(f"routes/11/{ID}", routes(9).encode())
    assert files.find(ID, None).sample[0] == 9


def test_the_last_sampled_token_has_no_route() -> None:
    tokens, found = routes(8).part(Span(ID, True, 0, 3))
    assert (tokens.tolist(), found[:, 0, 0].tolist()) == ([8, 4, 5], [7, 7])
    tokens, found = routes(8).part(Span(ID, False, 1, 1))
    assert (tokens.tolist(), found[:, 0, 0].tolist()) == ([2], [1])


def test_routes_live_for_a_day_at_least_and_two_at_most(files: RouteFiles, clock: Clock, store: FolderStore) -> None:
    attempt = files.add({ID: routes(8)}).attempt
    store.put_new("models/kept", b"x")
    clock.now = 12 * DAY_S - 1  # almost two days later
    assert files.remove_old() == 10
    assert files.find(ID, attempt).sample[0] == 8
    clock.now = 12 * DAY_S
    with pytest.raises(NotFound):
        files.find(ID, attempt)
    files.remove_old()
    assert store.list("") == ["models/kept"]


def test_a_foreign_file_among_the_routes_keeps_none_of_them(
    files: RouteFiles, clock: Clock, store: FolderStore
) -> None:
    files.add({ID: routes(8)})
    store.put_new("routes/Thumbs.db", b"x")
    clock.now = 12 * DAY_S
    files.remove_old()
    assert store.list("") == ["routes/Thumbs.db"]
