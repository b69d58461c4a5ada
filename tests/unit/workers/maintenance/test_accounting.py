"""Pages of past hours reach the object store once, complete, and stay when the state server loses everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from app.domain.records import Checkpoint
from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.pages import Fields, LedgerPage, PageFiles
from app.stores.redis.pages import Ledgers, RedisPages
from app.stores.redis.records import RedisRecords, dump
from tests.pages import age, in_mid_hour, listed, used
from workers.maintenance.accounting import Accounting

SAVED = Checkpoint("me", "session:train:0", "weights", "base", "x", 0.0, 1000, {}, [])


class Files(PageFiles):
    """An object store. `away`: it keeps nothing; `dies`: the process dies once a page is kept."""

    away = dies = False

    def add(self, page: LedgerPage, fields: Fields) -> None:
        if self.away:
            raise Unavailable("the store is away")
        super().add(page, fields)
        if self.dies:
            raise KeyboardInterrupt


@dataclass
class Installation:
    client: redis.Redis
    files: Files

    def __post_init__(self) -> None:
        self.records, self.pages = RedisRecords(self.client), RedisPages(self.client, EngineSettings())
        self.ledgers = Ledgers(self.pages, self.files)

    def task(self) -> Accounting:
        """The task, as a new process has it."""
        return Accounting(self.pages, self.files, self.records)

    def entries(self) -> dict[int, set[str]]:
        """All readable entries, by hour."""
        now = int(self.records.now() // 3600)
        found = self.ledgers.read("audit", ["me"], range(now - 100, now + 1))
        return {page.hour: set(fields) for page, fields in found.items()}


@pytest.fixture
def installation(client: redis.Redis, tmp_path: Path) -> Installation:
    in_mid_hour()
    return Installation(client, Files(FolderStore(tmp_path, "", "")))


def written(installation: Installation) -> dict[int, set[str]]:
    """Entries of two hours, one of which is over."""
    installation.records.note("audit", "me", "one", "x")
    age(installation.client)
    installation.records.note("audit", "me", "two", "x")
    found = installation.entries()
    assert list(found.values()) == [{"one"}, {"two"}]
    return found


def test_past_hours_survive_an_emptied_state_server(installation):
    past = written(installation)
    installation.task().sweep()
    assert installation.entries() == past
    assert len(listed(installation.client)) == 1, "only this hour's is at the state server"
    installation.client.flushall()
    assert installation.entries() == {min(past): {"one"}}


def test_a_task_that_died_halfway_is_completed_by_the_next(installation):
    past = written(installation)
    installation.files.dies = True
    with pytest.raises(KeyboardInterrupt):
        installation.task().sweep()
    assert installation.entries() == past, "a page in both places is read once"
    installation.files.dies = False
    installation.task().sweep()
    assert installation.entries() == past
    assert len(listed(installation.client)) == 1


def test_while_the_object_store_is_away_everything_stays(installation):
    past = written(installation)
    installation.files.away = True
    for _ in range(2):
        with pytest.raises(Unavailable):
            installation.task().sweep()
        assert len(listed(installation.client)) == 2
    installation.files.away = False
    installation.task().sweep()
    assert installation.entries() == past


def test_a_state_server_that_was_set_back_changes_nothing_that_was_kept(installation):
    past = written(installation)
    installation.task().sweep()
    installation.client.flushall()
    installation.records.note("audit", "me", "older", "x")
    age(installation.client)
    installation.task().sweep()
    assert installation.entries() == {min(past): {"one"}}


def test_two_leaders_keep_a_page_once(installation, monkeypatch):
    """The other leader keeps the page after this one has asked for it and before this one reads it."""
    past, find = written(installation), installation.pages.fields

    def late(page: LedgerPage) -> Fields:
        monkeypatch.undo()
        installation.task().sweep()
        return find(page)

    monkeypatch.setattr(installation.pages, "fields", late)
    installation.task().sweep()
    assert installation.entries() == past


def test_a_page_that_is_on_its_way_while_it_is_read_is_not_missed(installation, monkeypatch):
    past, moved = written(installation), []

    def then_move(find):
        def found(*args):
            result = find(*args)
            if not moved:
                moved.append(True)
                installation.task().sweep()
            return result

        return found

    for part in (installation.pages, installation.files):
        monkeypatch.setattr(part, "find", then_move(part.find))
    assert installation.entries() == past
    assert moved


def test_of_a_page_in_both_places_the_object_stores_counts(installation):
    """A state server that was set back has an older page."""
    past = written(installation)
    [older, _] = listed(installation.client)
    installation.files.add(older, {"one": "x", "more": "x"})
    assert installation.entries() == {**past, older.hour: {"one", "more"}}


def test_nothing_is_kept_of_a_page_that_was_lost_on_its_way(installation, monkeypatch):
    """Otherwise a backup of the page could not be restored."""
    written(installation)
    find = installation.pages.fields

    def lost(page: LedgerPage) -> Fields:
        installation.client.flushall()
        return find(page)

    monkeypatch.setattr(installation.pages, "fields", lost)
    installation.task().sweep()
    assert installation.entries() == {}
    hour = int(installation.records.now() // 3600)
    assert installation.files.find("audit", "me", range(hour - 9, hour + 1)) == {}


def test_checkpoints_count_byte_by_byte_and_second_by_second(installation, monkeypatch):
    now = installation.records.now()
    hours = [now // 3600 * 3600 + offset for offset in (100.0, 700.0, 4000.0)]
    installation.records.put(Checkpoint.namespace, "one", dump(SAVED))
    installation.records.put(Checkpoint.namespace, "expired", dump(replace(SAVED, expires_at=1.0)))
    for at, moment in enumerate(hours):
        if at == 2:
            installation.records.put(
                Checkpoint.namespace, "two", dump(replace(SAVED, base_model="other", size_bytes=10))
            )
        monkeypatch.setattr(installation.records, "now", lambda moment=moment: moment)
        installation.task().sweep()
    assert used(installation.client) == {"storage  base": 1000 * 3900, "storage  other": 10 * 3300}
    first, second = (installation.pages.fields(page) for page in listed(installation.client))
    assert (int(first["storage  base"]), int(second["storage  base"])) == (1000 * 3500, 1000 * 400)


def test_a_checkpoint_that_cannot_be_read_keeps_no_other_from_counting_and_no_page_here(installation, monkeypatch):
    written(installation)
    now = installation.records.now() // 3600 * 3600 + 700.0  # all in one hour
    monkeypatch.setattr(installation.records, "now", lambda: now)
    installation.pages.measure(None, now - 100, [])
    installation.records.put(Checkpoint.namespace, "a", {**dump(SAVED), "expires_at": '"x"'})
    installation.records.put(Checkpoint.namespace, "b", dump(SAVED))
    installation.task().sweep()
    assert used(installation.client)["storage  base"] == 1000 * 100
    assert len(installation.files.find("audit", "me", range(int(now // 3600)))) == 1


def test_a_clock_that_was_set_back_counts_no_time_twice(installation, monkeypatch):
    hour = installation.records.now() // 3600 * 3600
    installation.records.put(Checkpoint.namespace, "one", dump(SAVED))
    for offset in (100.0, 1900.0, 700.0, 2000.0):
        monkeypatch.setattr(installation.records, "now", lambda moment=hour + offset: moment)
        installation.task().sweep()
    assert used(installation.client) == {"storage  base": 1000 * 1900}


def test_a_round_measures_no_oftener_than_needed(installation, monkeypatch):
    task, asked = installation.task(), []
    monkeypatch.setattr(installation.pages, "measure", lambda *args: asked.append(args))
    for _ in range(3):
        task.sweep()
    assert len(asked) == 1


def test_what_was_not_measured_for_long_counts_for_a_day(installation):
    installation.records.put(Checkpoint.namespace, "one", dump(SAVED))
    now = installation.records.now()
    installation.pages.measure(None, now - 10 * 86_400, [])
    installation.files.away = True
    with pytest.raises(Unavailable):
        installation.task().sweep()
    [amount] = used(installation.client).values()
    assert amount == pytest.approx(1000 * 86_400, rel=1e-3)
