"""Pages of past hours reach the object store once, complete, and stay when the state server loses everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from app.domain.records import Checkpoint, dump
from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.pages import Fields, Page, PageFiles
from app.stores.redis.pages import RedisPages, UsageLedger
from app.stores.redis.records import RedisRecords
from tests.pages import age, in_mid_hour, listed, used
from workers.maintenance.leader import Accounting

SAVED = Checkpoint("me", "session:train:0", "weights", "base", "x", 0.0, 1000, {}, [])


class Files(PageFiles):
    """An object store. `away`: it keeps nothing; `dies`: the process dies once a page is kept."""

    away = dies = False

    def add(self, page: Page, fields: Fields) -> None:
        if self.away:
            raise Unavailable("the store is away")
        super().add(page, fields)
        if self.dies:
            raise KeyboardInterrupt


@dataclass
class Place:
    client: redis.Redis
    files: Files

    def __post_init__(self) -> None:
        self.records, self.pages = RedisRecords(self.client), RedisPages(self.client, EngineSettings())
        self.ledger = UsageLedger(self.pages, self.files)

    def chore(self) -> Accounting:
        """The chore, as a new process has it."""
        return Accounting(self.pages, self.files, self.records)

    def entries(self) -> dict[int, set[str]]:
        """All readable entries, by hour."""
        now = int(self.records.now() // 3600)
        found = self.ledger.read("audit", ["me"], range(now - 100, now + 1))
        return {page.hour: set(fields) for page, fields in found.items()}


@pytest.fixture
def place(client: redis.Redis, tmp_path: Path) -> Place:
    in_mid_hour()
    return Place(client, Files(FolderStore(tmp_path, "", "")))


def written(place: Place) -> dict[int, set[str]]:
    """Entries of two hours, one of which is over."""
    place.records.note("audit", "me", "one", "x")
    age(place.client)
    place.records.note("audit", "me", "two", "x")
    found = place.entries()
    assert list(found.values()) == [{"one"}, {"two"}]
    return found


def test_past_hours_survive_an_emptied_state_server(place):
    past = written(place)
    place.chore().sweep()
    assert place.entries() == past
    assert len(listed(place.client)) == 1, "only this hour's is at the state server"
    place.client.flushall()
    assert place.entries() == {min(past): {"one"}}


def test_a_task_that_died_halfway_is_completed_by_the_next(place):
    past = written(place)
    place.files.dies = True
    with pytest.raises(KeyboardInterrupt):
        place.chore().sweep()
    assert place.entries() == past, "a page in both places is read once"
    place.files.dies = False
    place.chore().sweep()
    assert place.entries() == past
    assert len(listed(place.client)) == 1


def test_while_the_object_store_is_away_everything_stays(place):
    past = written(place)
    place.files.away = True
    for _ in range(2):
        with pytest.raises(Unavailable):
            place.chore().sweep()
        assert len(listed(place.client)) == 2
    place.files.away = False
    place.chore().sweep()
    assert place.entries() == past


def test_a_state_server_that_was_set_back_changes_nothing_that_was_kept(place):
    past = written(place)
    place.chore().sweep()
    place.client.flushall()
    place.records.note("audit", "me", "older", "x")
    age(place.client)
    place.chore().sweep()
    assert place.entries() == {min(past): {"one"}}


def test_two_leaders_keep_a_page_once(place, monkeypatch):
    """The other leader keeps the page after this one has asked for it and before this one reads it."""
    past, find = written(place), place.pages.fields

    def late(page: Page) -> Fields:
        monkeypatch.undo()
        place.chore().sweep()
        return find(page)

    monkeypatch.setattr(place.pages, "fields", late)
    place.chore().sweep()
    assert place.entries() == past


def test_a_page_that_is_on_its_way_while_it_is_read_is_not_missed(place, monkeypatch):
    past, moved = written(place), []

    def then_move(find):
        def found(*args):
            result = find(*args)
            if not moved:
                moved.append(True)
                place.chore().sweep()
            return result

        return found

    for part in (place.pages, place.files):
        monkeypatch.setattr(part, "find", then_move(part.find))
    assert place.entries() == past
    assert moved


def test_of_a_page_in_both_places_the_object_stores_counts(place):
    """A state server that was set back has an older page."""
    past = written(place)
    [older, _] = listed(place.client)
    place.files.add(older, {"one": "x", "more": "x"})
    assert place.entries() == {**past, older.hour: {"one", "more"}}


def test_nothing_is_kept_of_a_page_that_was_lost_on_its_way(place, monkeypatch):
    """Otherwise a backup of the page could not be restored."""
    written(place)
    find = place.pages.fields

    def lost(page: Page) -> Fields:
        place.client.flushall()
        return find(page)

    monkeypatch.setattr(place.pages, "fields", lost)
    place.chore().sweep()
    assert place.entries() == {}
    hour = int(place.records.now() // 3600)
    assert place.files.find("audit", "me", range(hour - 9, hour + 1)) == {}


def test_checkpoints_count_byte_by_byte_and_second_by_second(place, monkeypatch):
    now = place.records.now()
    hours = [now // 3600 * 3600 + offset for offset in (100.0, 700.0, 4000.0)]
    place.records.put(Checkpoint.namespace, "one", dump(SAVED))
    place.records.put(Checkpoint.namespace, "expired", dump(replace(SAVED, expires_at=1.0)))
    for at, moment in enumerate(hours):
        if at == 2:
            place.records.put(Checkpoint.namespace, "two", dump(replace(SAVED, base_model="other", size_bytes=10)))
        monkeypatch.setattr(place.records, "now", lambda moment=moment: moment)
        place.chore().sweep()
    assert used(place.client) == {"storage  base": 1000 * 3900, "storage  other": 10 * 3300}
    first, second = (place.pages.fields(page) for page in listed(place.client))
    assert (int(first["storage  base"]), int(second["storage  base"])) == (1000 * 3500, 1000 * 400)


def test_a_clock_that_was_set_back_counts_no_time_twice(place, monkeypatch):
    hour = place.records.now() // 3600 * 3600
    place.records.put(Checkpoint.namespace, "one", dump(SAVED))
    for offset in (100.0, 1900.0, 700.0, 2000.0):
        monkeypatch.setattr(place.records, "now", lambda moment=hour + offset: moment)
        place.chore().sweep()
    assert used(place.client) == {"storage  base": 1000 * 1900}


def test_a_round_measures_no_oftener_than_needed(place, monkeypatch):
    chore, asked = place.chore(), []
    monkeypatch.setattr(place.pages, "measure", lambda *args: asked.append(args))
    for _ in range(3):
        chore.sweep()
    assert len(asked) == 1


def test_what_nobody_measured_for_long_counts_for_a_day(place):
    place.records.put(Checkpoint.namespace, "one", dump(SAVED))
    now = place.records.now()
    place.pages.measure(None, now - 10 * 86_400, [])
    place.files.away = True
    with pytest.raises(Unavailable):
        place.chore().sweep()
    [amount] = used(place.client).values()
    assert amount == pytest.approx(1000 * 86_400, rel=1e-3)
