"""Queue position: the reported number of earlier calls, compared with the order of a real fair queue."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import pytest

from app.domain.records import Worker
from app.services.queue_positions import Position, QueuePositions, describe
from app.stores.redis.types import ModelLine, Unfinished, WaitingSample

T = TypeVar("T")
TRAIN, SAMPLE = "train.b", "sample.b"


def worker(queue: str = TRAIN, pace_s: float = 2.0, batch: int = 0) -> Worker:
    return Worker("trainer", "b", {}, {}, "", 0.0, queue=queue, batch=batch, pace_s=pace_s)


def line(name: str, owner: str = "me", waiting: int = 1, *, node: str = "w", queue: str = TRAIN, **more) -> ModelLine:
    return ModelLine(f"{name}:train:0", owner, queue, node, 9, waiting, **{"running": False, "admitted": True, **more})


def training(
    *lines: ModelLine, workers: Mapping[str, Worker] | None = None, weights: Mapping[str, float] = MappingProxyType({})
) -> QueuePositions:
    found = Unfinished(lines, [], {})
    return QueuePositions(
        found, {"w": worker()} if workers is None else workers, lambda project: weights.get(project, 1.0)
    )


def sampling(owners: Sequence[str], *, batch: int = 1, sequences: int = 0, workers: int = 1) -> QueuePositions:
    found = [WaitingSample(f"s:sample:0:{i}", owner, SAMPLE) for i, owner in enumerate(owners)]
    pool = {str(i): worker(SAMPLE, batch=batch) for i in range(workers)}
    return QueuePositions(Unfinished([], found, {SAMPLE: sequences}), pool, lambda project: 1.0)


def round_robin(queues: Mapping[str, Mapping[str, int]]) -> list[tuple[str, int]]:
    """(model, its n-th call) in the order of turns over projects, then over their models."""
    projects = deque(deque([name, 0, count] for name, count in models.items()) for models in queues.values())
    order: list[tuple[str, int]] = []
    while projects:
        models = projects.popleft()
        name, done, count = models.popleft()
        order.append((name, done))
        if done + 1 < count:
            models.append([name, done + 1, count])
        if models:
            projects.append(models)
    return order


@pytest.mark.parametrize("seed", range(20))
def test_no_more_runs_before_a_call_than_is_said_whoever_begins(seed: int) -> None:
    rng = random.Random(seed)
    queues = {
        f"p{p}": {f"p{p}m{m}": rng.randint(1, 12) for m in range(rng.randint(1, 4))} for p in range(rng.randint(1, 5))
    }
    positions = training(*(line(name, p, count) for p, models in queues.items() for name, count in models.items()))
    order = round_robin({project: _shuffled(rng, models) for project, models in _shuffled(rng, queues).items()})
    said = [positions.of(f"{name}:train:0:{10 + n}") for name, n in order]
    assert all(position is not None and at <= position.before < len(order) for at, position in enumerate(said))


def _shuffled(rng: random.Random, items: Mapping[str, T]) -> dict[str, T]:
    return dict(rng.sample(sorted(items.items()), len(items)))


def test_alone_the_number_is_exact_and_grows_with_the_seq() -> None:
    found = training(line("a", waiting=3))
    assert [found.of(f"a:train:0:{seq}") for seq in (9, 10, 11, 12)] == [
        None,
        Position(0, 0.0),
        Position(1, 2.0),
        Position(2, 4.0),
    ]


def test_the_models_of_a_project_are_counted_once_for_all_of_its_calls() -> None:
    class Waiting(int):
        """A number of calls that notes when it is compared."""

        looks = 0

        def __gt__(self, other: int) -> bool:
            Waiting.looks += 1
            return super().__gt__(other)

        def __lt__(self, other: int) -> bool:
            Waiting.looks += 1
            return super().__lt__(other)

    positions = training(*(line(f"m{number}", waiting=Waiting(2)) for number in range(1000)))
    assert positions.of("m0:train:0:10").before == 999
    Waiting.looks = 0
    for number in range(1, 1000):
        assert positions.of(f"m{number}:train:0:10").before == 999
    assert Waiting.looks < 10 * 1000
    assert positions.of("m0:train:0:11").before == 1 + 999 * 2


def test_a_long_queue_of_another_costs_one_call_for_each_of_ones_own() -> None:
    found = training(line("a", waiting=2), line("heavy", "you", waiting=500))
    assert [found.of(f"a:train:0:{seq}").before for seq in (10, 11)] == [1, 3]
    two = training(line("a"), *(line(f"heavy{i}", "you", waiting=500) for i in range(8)))
    assert two.of("a:train:0:10").before == 1, "one project has one turn, however many models"


@pytest.mark.parametrize(("weight", "before"), [(1.0, [1, 3]), (3.0, [3, 7]), (0.25, [1, 2]), (0.5, [1, 2])])
def test_a_project_of_more_weight_is_served_as_much_more_often(weight: float, before: list[int]) -> None:
    lines = line("a", waiting=2), line("heavy", "you", waiting=500)
    found = training(*lines, weights={"you": weight})
    assert [found.of(f"a:train:0:{seq}").before for seq in (10, 11)] == before
    scaled = training(*lines, weights={"you": 4 * weight, "me": 4.0})
    assert [scaled.of(f"a:train:0:{seq}").before for seq in (10, 11)] == before


def test_what_another_worker_holds_or_another_queue_is_for_is_not_in_the_way() -> None:
    workers = {"w": worker(), "v": worker(pace_s=1.0)}
    found = training(
        line("a"),
        line("elsewhere", "you", 7, node="v"),
        line("nobody's", "him", 7, node=""),
        line("full", "her", 7, queue="full.b"),
        workers=workers,
    )
    assert found.of("a:train:0:10") == Position(1, 2.0), "only what nobody holds yet"
    unheld = found.of("nobody's:train:0:10")
    assert unheld.before == 2
    assert unheld.starts_in_s == pytest.approx(2 / (1 / 2 + 1)), "whoever is free first takes it"


def test_running_calls_and_calls_behind_a_lost_seq_are_distinguished() -> None:
    assert training(line("a", running=True)).of("a:train:0:10") == Position(0, 0.0, running=True)
    assert training(line("a", 2, running=True)).of("a:train:0:11").before == 1
    assert training(line("a", admitted=False)).of("a:train:0:11") == Position(1, None, missing=10)


def test_without_a_service_time_no_time_is_promised() -> None:
    found = training(line("a", waiting=2), workers={"w": worker(pace_s=0.0)})
    assert found.of("a:train:0:11") == Position(1, None)
    assert training(line("a", waiting=2), workers={}).of("a:train:0:11") == Position(1, None)


def test_samples_of_one_project_run_as_they_came_and_projects_take_turns() -> None:
    found = sampling(["you"] * 50 + ["me", "me"])
    assert [found.of(f"s:sample:0:{i}").before for i in (0, 1, 49, 50, 51)] == [1, 3, 51, 1, 3]
    assert found.of("s:sample:0:99") is None


def test_what_fits_into_the_batches_starts_at_once_and_the_rest_as_places_become_free() -> None:
    found = sampling(["me"] * 10, batch=4)
    assert [found.of(f"s:sample:0:{i}").starts_in_s for i in (0, 3, 4, 9)] == [0, 0, 2, 12]
    both = sampling(["me"] * 10, batch=4, workers=2)
    assert [both.of(f"s:sample:0:{i}").starts_in_s for i in (7, 8, 9)] == [0, 1, 2]
    wide = sampling(["me"] * 10, batch=4, sequences=40)
    assert [wide.of(f"s:sample:0:{i}").starts_in_s for i in (0, 1)] == [0, 2], "4 sequences each: one at a time"


def test_a_paused_sample_is_in_nobodys_way_and_has_no_time() -> None:
    found = [WaitingSample(f"s:sample:0:{i}", "you", SAMPLE, paused=i < 3) for i in range(5)]
    found.append(WaitingSample("s:sample:0:5", "me", SAMPLE))
    positions = QueuePositions(Unfinished([], found, {}), {"0": worker(SAMPLE, batch=1)}, lambda project: 1.0)
    assert [positions.of(f"s:sample:0:{i}").before for i in (3, 4, 5)] == [1, 2, 1]
    assert positions.of("s:sample:0:0") == Position(3, None, paused=True), "behind all others"


def test_everything_is_said_in_words() -> None:
    said = [
        Position(0, None, paused=True),
        Position(0, 0.0, running=True),
        Position(3, None, missing=7),
        Position(0, None),
        Position(2, 0.0),
        Position(1, None),
        Position(1, 0.4),
        Position(12, 34.2),
        Position(900, 3600.0),
    ]
    assert [describe(position) for position in said] == [
        "its client is silent; it waits for the client's next heartbeat, poll or call",
        "it runs now",
        "seq 7 of its model has not arrived yet and must run first",
        "it runs now, or starts next",
        "it runs now, or starts next",
        "1 call runs before it",
        "1 call runs before it, for about a second",
        "about 12 calls run before it, for about 34 s",
        "about 900 calls run before it, for about 60 min",
    ]
