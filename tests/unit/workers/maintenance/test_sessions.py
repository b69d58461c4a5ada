"""Cleanup after sessions removes their leftovers, and nothing else."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from app.domain.records import Checkpoint, Loss, Model, Sampler, Session
from app.errors import Gone, NotReplicated, Unavailable
from app.services.teardown import Teardown
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump, load
from app.stores.redis.types import Holder, Lease
from tests.unit.workers.sample.test_task_events import Sent, sent
from workers.maintenance.sessions import SessionExpiry

__all__ = ["sent"]

SESSION, OTHER = "session", "session2"
MODEL, OTHER_MODEL = f"{SESSION}:train:0", f"{OTHER}:train:0"
PATIENT = EngineSettings()
HASTY = EngineSettings(session_s=0.001, retain_s=0.001)
HOUR_MS = 3_600_000


def now_ms(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return seconds * 1000 + micros // 1000


def take_calls(client: redis.Redis, for_ms: int, seen_ms_ago: int = 0) -> None:
    """An API process lives, calls were taken for so long, and the last look at that was then."""
    client.set(keys.TAKING_CALLS, "")
    now = now_ms(client)
    client.hset(keys.CALLS_TAKEN, mapping={"since": now - for_ms, "seen": now - seen_ms_ago})


@dataclass
class Installation:
    """Two sessions with a model each, whose snapshot, checkpoint and ephemeral adapter are stored."""

    client: redis.Redis
    oplog: RedisOpLog
    records: RedisRecords
    store: FolderStore
    woken: list[Holder] = field(default_factory=list)

    def teardown(self, settings: EngineSettings = PATIENT) -> Teardown:
        lifecycle = RedisLifecycle(self.client, settings)
        return Teardown(lifecycle, self.records, self.store, self.woken.append)

    def sweep(self, settings: EngineSettings, rounds: int = 1) -> None:
        lifecycle = RedisLifecycle(self.client, settings)
        task = SessionExpiry(self.oplog, lifecycle, self.records, self.teardown(settings), settings.session_s)
        for _ in range(rounds):
            time.sleep(0.01)
            task.sweep()

    def status(self, session: str = SESSION) -> str:
        return load(Session, self.records.get(Session.namespace, session) or {}).status

    def samplers(self) -> list[str]:
        return [sampler for sampler, _ in self.records.list(Sampler.namespace)]

    def ended(self, model: str = MODEL) -> bool:
        try:
            self.oplog.acquire(model, "probe/1")
        except Gone:
            return True
        self.oplog.release(model, "probe/1")
        return False


@pytest.fixture
def installation(client: redis.Redis, tmp_path: Path) -> Installation:
    store = FolderStore(tmp_path, "secret", "http://x")
    made = Installation(client, RedisOpLog(client, PATIENT), RedisRecords(client), store)
    take_calls(client, HOUR_MS)
    for session, model in ((SESSION, MODEL), (OTHER, OTHER_MODEL)):
        made.records.put_new(Session.namespace, session, dump(Session("me", 0.0)))
        made.oplog.create_model(model, dump(Model("me", session, "base", 0.0)))
        RedisLifecycle(client, PATIENT).heartbeat(session)
        prefixes = [f"models/{model}/{rest}" for rest in ("snapshots/2/2-1", "weights/a/3-1", "sampler_weights/e/4-1")]
        for prefix in prefixes:
            store.put_new(f"{prefix}/manifest.json", b"{}")
        path = f"tinker://{model}/weights/a"
        kept = Checkpoint("me", model, "weights", "base", prefixes[1], 0.0, 2, {}, ["manifest.json"])
        made.records.put_new(Checkpoint.namespace, path, dump(kept))
        for name, sampler in (
            (f"{session}:sample:0", Sampler("me", session, "base", 0.0, prefix=prefixes[2])),
            (f"{session}:sample:1", Sampler("me", session, "base", 0.0, path, prefixes[1])),
        ):
            made.records.put_new(Sampler.namespace, name, dump(sampler))
    return made


def test_a_silent_session_expires_and_loses_nothing(installation: Installation):
    installation.sweep(PATIENT)
    assert installation.status() == "open"
    installation.sweep(HASTY.model_copy(update={"retain_s": 3600}), rounds=2)
    assert installation.status() == "expired"
    assert not installation.ended()
    assert len(installation.store.list("models/")) == 6


@pytest.mark.parametrize("seen_ms_ago", [HOUR_MS, -HOUR_MS], ids=["an outage or a sleep", "a clock that was set back"])
def test_time_that_nobody_saw_is_no_silence_of_a_client(installation: Installation, seen_ms_ago: int):
    """The state server or the machine was away for an hour. No heartbeat could arrive before the first sweep."""
    installation.client.zadd(keys.SESSIONS_HEARD, {SESSION: now_ms(installation.client) - HOUR_MS})
    take_calls(installation.client, 2 * HOUR_MS, seen_ms_ago)
    sampler = f"{SESSION}:sample:0"
    installation.oplog.admit_sample(f"{OTHER}:sample:0:0", f"{OTHER}:sample:0", "me", "sample.base", b"ask", "d")
    installation.sweep(PATIENT, rounds=2)
    assert installation.status() == "open"
    take_calls(installation.client, HOUR_MS)
    installation.sweep(PATIENT)
    assert (installation.status(), installation.status(OTHER)) == ("expired", "open")
    assert sampler in installation.samplers()


def test_the_time_in_which_the_lead_passes_to_another_worker_is_silence_too(installation: Installation):
    installation.client.zadd(keys.SESSIONS_HEARD, {SESSION: now_ms(installation.client) - HOUR_MS})
    take_calls(installation.client, 2 * HOUR_MS, seen_ms_ago=20_000)
    installation.sweep(PATIENT)
    assert installation.status() == "expired"


def test_time_without_an_api_is_no_silence_of_a_client(installation: Installation):
    installation.client.zadd(keys.SESSIONS_HEARD, {SESSION: now_ms(installation.client) - HOUR_MS})
    installation.client.delete(keys.TAKING_CALLS)
    installation.sweep(PATIENT)
    installation.client.set(keys.TAKING_CALLS, "")
    installation.sweep(PATIENT)
    assert installation.status() == "open"


@pytest.mark.parametrize(("taken_ms", "paused"), [(30_000, 0), (90_000, 1)])
def test_samples_are_paused_for_silence_in_which_calls_were_taken(
    installation: Installation, taken_ms: int, paused: int
):
    sampler = f"{SESSION}:sample:0"
    installation.oplog.admit_sample(f"{sampler}:0", sampler, "me", "sample.base", b"ask", "d")
    installation.client.zadd(keys.SESSIONS_HEARD, {SESSION: now_ms(installation.client) - 90_000})
    take_calls(installation.client, taken_ms)
    installation.sweep(PATIENT)
    assert [row.throttled for row in installation.oplog.pending()] == [bool(paused)]
    RedisLifecycle(installation.client, PATIENT).heartbeat(SESSION)
    take_calls(installation.client, 0)
    installation.sweep(PATIENT)
    assert [id_ for id_, _ in installation.oplog.release_samples("sample.base")] == [f"{sampler}:0"] * paused


def test_after_an_outage_a_client_has_time_to_come_back_before_its_run_is_removed(installation: Installation):
    installation.teardown().finish(SESSION, "success")
    installation.client.zadd(keys.SESSIONS_ENDED, {SESSION: 1})
    take_calls(installation.client, 30 * 24 * HOUR_MS, seen_ms_ago=8 * 24 * HOUR_MS)
    installation.sweep(PATIENT)
    assert not installation.ended()
    take_calls(installation.client, HOUR_MS)
    installation.sweep(PATIENT)
    assert installation.ended()


def test_long_after_its_session_a_model_is_ended_and_only_what_was_saved_stays(installation: Installation):
    installation.teardown().finish(SESSION, "success")
    installation.sweep(PATIENT)
    assert not installation.ended()
    installation.sweep(PATIENT.model_copy(update={"retain_s": 0.001}))
    assert installation.ended()
    assert installation.store.list(f"models/{MODEL}/") == [f"models/{MODEL}/weights/a/3-1/manifest.json"]
    assert installation.records.get(Checkpoint.namespace, f"tinker://{MODEL}/weights/a")
    assert not [sampler for sampler in installation.samplers() if sampler.startswith(f"{SESSION}:")]


def test_a_run_of_a_retired_session_stays_known_as_long_as_it_may_have_files(installation: Installation):
    """The orphans task forgets it; its files would stay for ever if the run were forgotten before."""
    installation.records.delete(Checkpoint.namespace, f"tinker://{MODEL}/weights/a")
    installation.teardown().finish(SESSION, "success")
    installation.sweep(PATIENT.model_copy(update={"retain_s": 0.001}))
    assert installation.records.get(Session.namespace, SESSION) is None
    assert installation.ended()
    assert installation.store.list(f"models/{MODEL}/")


def test_the_end_of_one_session_takes_nothing_of_another(installation: Installation):
    installation.teardown().finish(SESSION, "success")
    installation.sweep(PATIENT.model_copy(update={"retain_s": 0.001}))
    assert not installation.ended(OTHER_MODEL)
    assert installation.status(OTHER) == "open"
    assert len(installation.store.list(f"models/{OTHER_MODEL}/")) == 3
    assert installation.samplers() == [f"{OTHER}:sample:0", f"{OTHER}:sample:1"]


def test_custom_losses_go_with_their_session(installation: Installation):
    for session in (SESSION, OTHER):
        installation.records.put_new(Loss.namespace, f"{session}:loss:0", dump(Loss("me", session, 0.0, "")))
    installation.teardown().finish(SESSION, "success")
    installation.sweep(PATIENT)
    assert installation.records.get(Loss.namespace, f"{SESSION}:loss:0"), "its models can still be used"
    installation.sweep(PATIENT.model_copy(update={"retain_s": 0.001}))
    assert [loss_id for loss_id, _ in installation.records.list(Loss.namespace)] == [f"{OTHER}:loss:0"]


def test_the_rest_of_an_ended_models_journal_is_deleted_though_whoever_ended_it_has_died(installation: Installation):
    for seq in range(600):
        installation.oplog.admit(MODEL, seq, "forward", b"", f"d{seq}")
    RedisLifecycle(installation.client, PATIENT).end_model(MODEL)
    assert installation.client.exists(keys.journal(MODEL))
    installation.sweep(PATIENT)
    assert not installation.client.exists(keys.journal(MODEL))
    assert (last := installation.oplog.outcome(f"{MODEL}:599")) is not None and last.failed


def test_a_session_is_retired_once(installation: Installation):
    installation.teardown().finish(SESSION, "success")
    settings = PATIENT.model_copy(update={"retain_s": 0.001})
    installation.sweep(settings)
    assert RedisLifecycle(installation.client, settings).retired() == []


def test_a_session_of_many_runs_is_retired_in_parts_that_read_its_samplers_once_each(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.services.teardown._RETIRED_AT_ONCE", 4)
    runs = [MODEL, *(f"{SESSION}:train:{number}" for number in range(1, 10))]
    for run in runs[1:]:
        installation.oplog.create_model(run, dump(Model("me", SESSION, "base", 0.0)))
    for number in range(2, 7):
        sampler = f"{SESSION}:sample:{number}"
        installation.records.put_new(Sampler.namespace, sampler, dump(Sampler("me", SESSION, "base", 0.0)))
    installation.teardown().finish(SESSION, "success")
    time.sleep(0.01)
    left = []
    while RedisLifecycle(installation.client, HASTY).retired():
        installation.client.config_resetstat()
        installation.teardown(HASTY).retire(SESSION)
        left.append(sum(not installation.ended(run) for run in runs if installation.records.get(Model.namespace, run)))
        reads = installation.client.info("commandstats")["cmdstat_hgetall"]["calls"]
        assert reads <= len(runs) * 2 + 9, "the records of its runs and samplers once, and those that this test reads"
    assert left == [6, 2, 0]
    assert [sampler for sampler in installation.samplers() if sampler.startswith(f"{SESSION}:")] == []
    assert installation.records.get(Session.namespace, SESSION) is None


def test_a_session_that_is_retired_takes_its_custom_losses_along_also_after_an_interruption(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
):
    for number in range(450):
        loss = Loss("me", SESSION, 0.0, "abcd")
        installation.records.put_loss(f"{SESSION}:loss:{number}", loss, 10**6)
    installation.records.put_loss(f"{OTHER}:loss:0", Loss("me", OTHER, 0.0, ""), 1)
    installation.teardown().finish(SESSION, "success")
    settings = PATIENT.model_copy(update={"retain_s": 0.001})
    forget, replies = RedisLifecycle.forget, []

    def forget_and_break_off_once(lifecycle: RedisLifecycle, session_id: str) -> bool | None:
        replies.append(forget(lifecycle, session_id))
        if len(replies) == 1:
            raise NotReplicated("a replica is behind")
        return replies[-1]

    monkeypatch.setattr(RedisLifecycle, "forget", forget_and_break_off_once)
    installation.sweep(settings)
    assert RedisLifecycle(installation.client, settings).retired() == [SESSION], "the rest is done later"
    left = list(installation.records.ids(Loss.namespace, f"{SESSION}:loss:"))
    assert 0 < len(left) < 450
    assert installation.client.hget(f"tinsmith:sessions:{SESSION}", "loss_bytes") == str(4 * len(left)).encode()
    installation.sweep(settings)
    assert list(installation.records.ids(Loss.namespace, "")) == [f"{OTHER}:loss:0"]
    assert len(list(installation.client.scan_iter("tinsmith:losses:*"))) == 1
    assert installation.records.get(Session.namespace, SESSION) is None


def test_an_ended_run_takes_its_adapters_along_and_reads_no_record_of_its_sessions_other_samplers(
    installation: Installation,
):
    """A run saves an adapter at every step, and a session may have many runs. A script looks at 1,000 at a time."""
    near = f"{SESSION}:train:01"  # its id begins as the run's does
    mine, others = [f"{SESSION}:sample:{number}" for number in (0, 9999)], list[str]()
    last = Sampler("me", SESSION, "base", 0.0, prefix=f"models/{MODEL}/sampler_weights/e/5-1")
    installation.records.put_new(Sampler.namespace, mine[1], dump(last))
    installation.store.put_new(f"{last.prefix}/manifest.json", b"{}")
    foreign = dump(Sampler("me", SESSION, "base", 0.0, prefix=f"models/{near}/sampler_weights/e/4-1"))
    for number in range(2, 1500):
        others.append(f"{SESSION}:sample:{number}")
        installation.records.put_new(Sampler.namespace, others[-1], foreign)
    installation.client.config_resetstat()
    installation.teardown().end(MODEL)
    reads = installation.client.info("commandstats")
    assert reads.get("cmdstat_hgetall", {"calls": 0})["calls"] == 0
    assert reads["cmdstat_zrangebylex"]["calls"] < 10
    kept = {f"{SESSION}:sample:1", *others, f"{OTHER}:sample:0", f"{OTHER}:sample:1"}
    assert set(installation.samplers()) == kept, "a checkpoint with a path, other runs and other sessions stay"
    assert not [name for name in installation.store.list(f"models/{MODEL}/") if "sampler_weights" in name]


@pytest.mark.parametrize("saved", [True, False])
def test_what_belongs_to_a_session_that_came_back_in_between_stays(installation: Installation, saved: bool):
    if not saved:
        installation.records.delete(Checkpoint.namespace, f"tinker://{MODEL}/weights/a")
    before = installation.samplers()
    installation.teardown(HASTY).retire(SESSION)
    assert installation.records.get(Model.namespace, MODEL)
    assert not installation.ended()
    assert installation.samplers() == before


def test_a_finish_wakes_each_trainer_that_holds_one_of_its_models_and_no_other(installation: Installation):
    for i in (1, 2):
        installation.oplog.create_model(f"{SESSION}:train:{i}", dump(Model("me", SESSION, "base", 0.0)))
    for model, worker in ((MODEL, "a/1"), (f"{SESSION}:train:1", "a/1"), (OTHER_MODEL, "b/1")):
        assert isinstance(installation.oplog.acquire(model, worker), Lease)
    installation.teardown().finish(SESSION, "success")
    assert installation.woken == [Holder("base", "a")]


def test_the_end_of_a_model_wakes_its_trainer(installation: Installation):
    installation.oplog.acquire(MODEL, "a/1")
    installation.teardown().end(MODEL)
    installation.teardown().end(OTHER_MODEL)
    assert installation.woken == [Holder("base", "a")]


def test_a_deleted_model_takes_its_own_ephemeral_adapters_and_leaves_other_samplers(installation: Installation):
    siblings = Sampler("me", SESSION, "base", 0.0, prefix=f"models/{SESSION}:train:1/sampler_weights/e/4-1")
    installation.records.put_new(Sampler.namespace, f"{SESSION}:sample:2", dump(siblings))
    own = json.loads(installation.records.get(Sampler.namespace, f"{SESSION}:sample:0")["prefix"])
    for prefix in (own, siblings.prefix):
        installation.client.set(f"{keys.PREFIX}home:{prefix}", "node")
    installation.teardown().end(MODEL)
    assert installation.client.keys(f"{keys.PREFIX}home:*") == [f"{keys.PREFIX}home:{siblings.prefix}".encode()]
    left = {f"{SESSION}:sample:1", f"{SESSION}:sample:2", f"{OTHER}:sample:0", f"{OTHER}:sample:1"}
    assert set(installation.samplers()) == left
    assert installation.store.list(f"models/{MODEL}/") == [f"models/{MODEL}/weights/a/3-1/manifest.json"]
    assert installation.status() == "open"


def test_a_model_ends_though_the_object_store_is_away_and_its_files_go_when_asked_again(
    installation: Installation, monkeypatch
):
    with monkeypatch.context() as away:

        def down(_: str) -> list[str]:
            raise Unavailable("down")

        away.setattr(installation.store, "list", down)
        installation.teardown().end(MODEL)
    assert installation.ended()
    installation.teardown().end(MODEL)
    assert not installation.store.list(f"models/{MODEL}/snapshots/")


@pytest.mark.parametrize("how", ["silent", "finished"])
def test_the_samples_of_an_ended_session_are_cancelled_later_if_they_were_not_then(
    installation: Installation, how: str
):
    sampler, other = f"{SESSION}:sample:0", f"{OTHER}:sample:0"
    for name in (sampler, other):
        installation.oplog.admit_sample(f"{name}:0", name, "me", "sample.base", b"ask", "d")
    if how == "finished":
        RedisLifecycle(installation.client, PATIENT).finish(SESSION, "success")  # and its API process died
        installation.sweep(PATIENT)
    else:
        installation.client.zadd(keys.SESSIONS_HEARD, {SESSION: 1})
        installation.sweep(PATIENT)
    result = installation.oplog.outcome(f"{sampler}:0")
    assert result is not None and result.failed
    assert installation.oplog.outcome(f"{other}:0") is None


def test_a_call_that_ends_without_a_run_is_revoked_once_on_the_dashboard(installation: Installation, sent: Sent):
    installation.client.rpush(keys.REVOKED, f"{SESSION}:sample:0:0")
    installation.sweep(PATIENT, rounds=2)
    assert sent.types == ["task-revoked"]
