"""Old adapters of saves without a path are given up; the newest ones and those in use stay, and all count."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis

from app import ids
from app.domain.accounts import Caller
from app.domain.limits import Limits, Payer
from app.domain.ops import Ragged
from app.domain.records import Model, Sampler, ShmTransfer
from app.domain.results import PROTOBUF, Result
from app.domain.routes import SequenceRoutes, Span
from app.errors import NotFound, Unavailable
from app.services.teardown import Teardown
from app.services.training import RouteService
from app.settings import EngineSettings, Settings
from app.stores.objects.folder import FolderStore
from app.stores.objects.routes import RouteFiles
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump
from tests.assembly import parts
from workers.maintenance import adapters
from workers.maintenance.adapters import EphemeralAdapters
from workers.maintenance.orphans import Orphans
from workers.process.parts import create_maintenance

RUN, OTHER_RUN = "session:train:0", "session:train:1"
KEPT = 2
PATIENT = EngineSettings(ephemeral_adapters=KEPT)
HASTY = EngineSettings(ephemeral_adapters=KEPT, ephemeral_s=0.001, orphan_s=0.001)
SIZE = 100


@dataclass
class Installation:
    client: redis.Redis
    store: FolderStore
    oplog: RedisOpLog
    records: RedisRecords

    def save(self, number: int, run: str = RUN, *, inflight: bool = False, epoch: int = 1) -> str:
        """Commits a save without a path at the seq `number`. Returns its sampling session."""
        sampler_id, prefix = f"session:sample:{number}", self.prefix(number, run, epoch)
        for name in ("adapter_model.safetensors", "manifest.json"):
            self.store.put_new(f"{prefix}/{name}", b"x")
        sampler = Sampler("me", "session", "base", 0.0, prefix=prefix, follows=run if inflight else "")
        self.records.put(Sampler.namespace, sampler_id, {**dump(sampler), "size_bytes": str(SIZE)})
        if inflight:
            self.records.update(Model.namespace, run, {"inflight": json.dumps(prefix)})
        return sampler_id

    @staticmethod
    def prefix(number: int, run: str = RUN, epoch: int = 1) -> str:
        return f"models/{run}/sampler_weights/ephemeral-{number}/{number}-{epoch}"

    def sample(self, sampler_id: str, seq: int = 0) -> str:
        request = f"{sampler_id}:{seq}"
        self.oplog.admit_sample(request, sampler_id, "me", "sample.base", b"prompt", "digest")
        return request

    def round(self, settings: EngineSettings = HASTY) -> None:
        time.sleep(0.01)  # longer than the settings' time
        lifecycle = RedisLifecycle(self.client, settings)
        EphemeralAdapters(lifecycle, self.records, self.store, settings).sweep()

    def stored(self) -> set[str]:
        return {key.rpartition("/")[0] for key in self.store.list("models/")}

    def used(self, kind: str = "project", id_: str = "me") -> int:
        return RedisQuotas(self.client, PATIENT).used(Payer(kind, id_, Limits())).storage_bytes


@pytest.fixture
def installation(client: redis.Redis, tmp_path: Path) -> Installation:
    store = FolderStore(tmp_path, "secret", "http://x")
    oplog = RedisOpLog(client, HASTY, store)
    for run in (RUN, OTHER_RUN):
        head = {"applied": "1000", "epoch": "1"}
        oplog.create_model(run, {**dump(Model("me", "session", "base", 0.0, key="k")), **head})
    return Installation(client, store, oplog, RedisRecords(client))


def sweep_orphans(installation: Installation) -> None:
    """Marks and sweeps, a moment apart."""
    lifecycle = RedisLifecycle(installation.client, HASTY)
    payloads = installation.oplog._payloads
    orphans = Orphans(installation.oplog, lifecycle, installation.records, payloads, installation.store, HASTY)
    for _ in range(2):
        time.sleep(0.01)
        orphans.sweep()


def test_of_each_run_the_newest_stay_in_the_order_of_their_saves(installation: Installation):
    numbers = (9, 10, 11)  # as texts they have another order
    for number in numbers:
        installation.save(number)
    first = installation.save(20, epoch=2)
    installation.save(3, OTHER_RUN)
    installation.round()
    kept = {installation.prefix(11), installation.prefix(20, epoch=2), installation.prefix(3, OTHER_RUN)}
    assert installation.stored() == kept
    assert installation.sample(first) and installation.sample("session:sample:3")


def test_workers_run_the_task(installation: Installation):
    for number in range(4):
        installation.save(number)
    settings = Settings(engine=HASTY)
    made = parts(installation.client, settings, "node/boot", installation.oplog, installation.store)
    made.keeper.stop()
    time.sleep(0.01)
    create_maintenance(made)._round("adapters")
    assert installation.stored() == {installation.prefix(number) for number in (2, 3)}


def test_a_client_of_an_adapter_that_was_given_up_learns_what_to_do(installation: Installation):
    samplers = [installation.save(number) for number in range(3)]
    installation.round()
    advice = r"session:sample:0' were deleted: .* the newest 2 stay, .* save the weights again, with a path"
    with pytest.raises(NotFound, match=advice):
        installation.sample(samplers[0])
    assert installation.sample(samplers[1])
    assert installation.client.zscore(keys.PENDING, f"{samplers[0]}:0") is None


def age(installation: Installation, sampler_id: str, days: int = 2) -> None:
    """The adapter was given up a little more than so many days ago."""
    name = keys.record(Sampler.namespace, sampler_id)
    installation.client.hset(name, "given_up", str(int(installation.records.now() - days * 86_400 - 1) * 1000))


def test_two_days_after_its_adapter_a_sampling_session_is_removed_and_leaves_nothing(installation: Installation):
    samplers = [installation.save(number) for number in range(4)]
    installation.round()
    installation.round()
    assert [sampler_id for sampler_id, _ in installation.records.list(Sampler.namespace)] == samplers
    age(installation, samplers[0])
    assert list(installation.client.scan_iter(f"*{samplers[0]}*"))
    installation.round()
    assert not list(installation.client.scan_iter(f"*{samplers[0]}*"))
    assert [sampler_id for sampler_id, _ in installation.records.list(Sampler.namespace)] == samplers[1:]
    assert installation.client.zscore(keys.index(Sampler.namespace), samplers[0]) is None
    with pytest.raises(NotFound, match="session:sample:0' does not exist"):
        installation.sample(samplers[0])
    with pytest.raises(NotFound, match="session:sample:0' does not exist"):
        installation.records.join(samplers[0])
    with pytest.raises(NotFound, match="session:sample:1' were deleted"):
        installation.sample(samplers[1])


def test_the_sampling_session_of_a_deleted_adapter_stays_as_long_as_an_unread_result(installation: Installation):
    samplers = [installation.save(number) for number in range(3)]
    installation.round()
    for days, settings in ((2, {"result_unread_s": 3 * 86_400}), (1, {"result_unread_s": 1})):
        age(installation, samplers[0], days)
        installation.round(HASTY.model_copy(update=settings))
        assert installation.records.find(Sampler, samplers[0])


def test_routes_of_a_deleted_adapter_can_be_used_while_they_are_stored(installation: Installation):
    """A client trains on yesterday's samples, and results are kept for a second."""
    samplers, now = [installation.save(number) for number in range(3)], installation.records.now
    request, tokens, routes = installation.sample(samplers[0]), np.array([1, 2], np.int32), np.ones((1, 2, 2), np.uint8)
    sequence = ids.sequence_id(request, 0)
    stored = RouteFiles(installation.store, lambda: now() - 86_400).add(
        {sequence: SequenceRoutes(tokens[:1], routes, tokens, routes)}
    )
    assert installation.oplog.finish_sample(request, Result(b"x", PROTOBUF), routes=stored)
    installation.round()
    age(installation, samplers[0], 1)
    installation.round(HASTY.model_copy(update={"result_unread_s": 1}))
    service = RouteService(installation.records, installation.oplog, RouteFiles(installation.store, now))
    batch = Ragged.of([tokens[:1]], np.int32)
    found = service.find(Caller.alone("me"), "base", batch, [[Span(sequence, False, 0, 1)]])
    assert found is not None and np.array_equal(next(iter(found)), routes)


@pytest.mark.parametrize("use", ["joined", "inflight", "unfinished"])
def test_the_sampling_session_of_a_deleted_adapter_stays_while_it_is_used(installation: Installation, use: str):
    samplers = [installation.save(number, inflight=use == "inflight") for number in range(4)]
    installation.round()
    if use == "joined":
        installation.records.join(samplers[0])
    elif use == "unfinished":  # an API process of an earlier version admitted it
        name = keys.record(Sampler.namespace, samplers[0])
        installation.client.hdel(name, "given_up")
        installation.sample(samplers[0])
        installation.client.delete(keys.PREFIX + "samplers_used")
    age(installation, samplers[0])
    installation.round(PATIENT if use == "joined" else HASTY)
    assert installation.records.get(Sampler.namespace, samplers[0])
    assert use != "inflight" or installation.sample(samplers[0])


@pytest.mark.parametrize("use", ["saved", "sampled", "joined"])
def test_what_was_used_within_the_time_stays(installation: Installation, use: str):
    samplers = [installation.save(number) for number in range(5)]
    if use == "saved":
        installation.records.put(Sampler.namespace, samplers[0], {"created": str(installation.records.now())})
    elif use == "sampled":
        request = installation.sample(samplers[0])
        installation.oplog.finish_sample(request, Result(b"{}"))
        installation.client.delete(f"tinsmith:home:{installation.prefix(0)}")
    else:
        installation.records.join(samplers[0])
    installation.round(PATIENT)
    assert installation.stored() == {installation.prefix(number) for number in (0, 3, 4)}
    installation.sample(samplers[0], 1)


def test_what_an_earlier_version_sampled_within_the_hour_stays(installation: Installation):
    for number in range(4):
        installation.save(number)
    installation.client.set(f"tinsmith:home:{installation.prefix(0)}", "node", px=3_600_000)
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (0, 2, 3)}


def test_what_an_unfinished_request_needs_stays_until_it_ends(installation: Installation):
    samplers = [installation.save(number) for number in range(4)]
    request = installation.sample(samplers[0])
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (0, 2, 3)}
    installation.oplog.finish_sample(request, Result(b"{}"))
    installation.client.delete(f"tinsmith:home:{installation.prefix(0)}")
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (2, 3)}


def test_a_request_that_comes_while_a_round_decides_keeps_its_adapter(installation: Installation, monkeypatch):
    samplers = [installation.save(number) for number in range(4)]
    give_up = RedisLifecycle.give_up_adapters

    def give_up_late(self: RedisLifecycle, sampler_ids: list[str]) -> list[str]:
        installation.sample(samplers[0])
        time.sleep(0.01)  # its use is long ago, and it is unfinished
        return give_up(self, sampler_ids)

    monkeypatch.setattr(RedisLifecycle, "give_up_adapters", give_up_late)
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (0, 2, 3)}


def test_in_flight_clients_sample_the_newest_weights_after_their_first_ones_went(installation: Installation):
    samplers = [installation.save(number, inflight=True) for number in range(4)]
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (2, 3)}
    request = installation.sample(samplers[0])
    assert installation.client.hget(keys.op(request), "adapter") == installation.prefix(3).encode()


def test_the_newest_in_flight_weights_stay_however_many_others_were_saved(installation: Installation):
    installation.save(0, inflight=True)
    for number in range(1, 5):
        installation.save(number)
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (0, 3, 4)}


def test_in_flight_weights_stay_while_another_clients_request_runs_on_them(installation: Installation):
    first = installation.save(0, inflight=True)
    installation.save(1, inflight=True)
    installation.sample(first)  # on the weights of save 1
    for number in range(2, 6):
        installation.save(number, inflight=True)
    installation.client.delete(f"tinsmith:home:{installation.prefix(1)}")
    installation.round()
    assert installation.prefix(1) in installation.stored()


def test_an_adapter_that_is_not_uploaded_yet_stays(installation: Installation):
    for number in range(4):
        installation.save(number)
    installation.records.put(ShmTransfer.namespace, installation.prefix(0), dump(ShmTransfer(RUN, 0)))
    installation.round()
    assert installation.stored() == {installation.prefix(number) for number in (0, 2, 3)}


def test_samplers_of_checkpoints_and_of_base_models_are_left_alone(installation: Installation):
    for number in range(4):
        installation.save(number)
    path = f"tinker://{RUN}/sampler_weights/a"
    named = Sampler("me", "session", "base", 0.0, path, installation.prefix(0))
    base = Sampler("me", "session", "base", 0.0)
    for number, sampler in enumerate((named, base), start=90):
        installation.records.put(Sampler.namespace, f"session:sample:{number}", dump(sampler))
    installation.round()
    assert installation.sample("session:sample:90") and installation.sample("session:sample:91")


def test_the_files_of_a_round_that_broke_off_are_orphans(installation: Installation, monkeypatch):
    def fail(*_: object) -> None:
        raise Unavailable("the object store is away")

    for number in range(4):
        installation.save(number)
    with monkeypatch.context() as broken:
        broken.setattr(adapters, "remove_checkpoint", fail)
        with pytest.raises(Unavailable):
            installation.round()
    assert len(installation.stored()) == 4
    sweep_orphans(installation)
    assert installation.stored() == {installation.prefix(number) for number in (2, 3)}


def test_the_files_of_a_round_that_broke_off_are_orphans_also_after_their_run_was_deleted(
    installation: Installation, monkeypatch
):
    """The teardown takes the files of a given-up adapter for gone."""
    for number in range(4):
        installation.save(number)
    with monkeypatch.context() as broken:
        broken.setattr(adapters, "remove_checkpoint", lambda *_: None)
        installation.round()
    lifecycle = RedisLifecycle(installation.client, HASTY)
    Teardown(lifecycle, installation.records, installation.store, lambda _: None).end(RUN)
    assert installation.stored() == {installation.prefix(number) for number in (0, 1)}
    sweep_orphans(installation)
    assert installation.stored() == set()


def test_adapters_count_as_stored_for_their_project_and_key_until_they_go(installation: Installation):
    for number in range(5):
        installation.save(number)
    installation.round(EngineSettings(ephemeral_adapters=4))
    assert (installation.used(), installation.used("key", "k")) == (4 * SIZE, 4 * SIZE)
    installation.round()
    assert (installation.used(), installation.used("key", "k")) == (KEPT * SIZE, KEPT * SIZE)
    for number in range(5):
        RedisLifecycle(installation.client, HASTY).end_sampler(f"session:sample:{number}", retired=False)
    installation.round()
    assert (installation.used(), installation.used("key", "k")) == (0, 0)
