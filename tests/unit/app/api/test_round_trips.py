"""Round trips to the state server that a read takes: each costs about as much processor time as all of Flask does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.connection import AbstractConnection
from werkzeug.test import TestResponse

from app import ids
from app.domain.records import Checkpoint
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, dump
from tests.unit.app.conftest import BASE, Api, batch
from tests.unit.app.tenant import Tenant

Read = Callable[[Api, str], TestResponse]
READS: dict[str, tuple[int, Read]] = {
    "healthz": (0, lambda api, _: api.get("healthz")),
    "get_info": (1, lambda api, run: api.post("get_info", {"model_id": run})),
    "session": (3, lambda api, run: api.get(f"sessions/{ids.session_of(run)}")),
    "sessions": (1, lambda api, _: api.get("sessions")),
    "run": (2, lambda api, run: api.get(f"training_runs/{run}")),
    "runs": (3, lambda api, _: api.get("training_runs")),
    "checkpoints of a run": (1, lambda api, run: api.get(f"training_runs/{run}/checkpoints")),
    "checkpoints": (3, lambda api, _: api.get("checkpoints")),
    "a finished future": (3, lambda api, run: api.post("retrieve_future", {"request_id": ids.request_id(run, 0)})),
    "the queue": (9, lambda api, _: api.get("queue")),
    "a search of sessions": (3, lambda api, _: api.post("sessions/search", {})),
    "the future of an unload": (1, lambda api, run: api.post("retrieve_future", {"request_id": ids.unload_id(run)})),
}


@pytest.fixture(autouse=True)
def fresh_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of the queue takes a snapshot of it."""
    monkeypatch.setattr("app.services.queue._SNAPSHOT_AGE_S", 0.0)


@contextmanager
def round_trips() -> Iterator[list[Any]]:
    """The commands and pipelines that this thread sends, without those that open a connection or see if it is alive."""
    sent: list[Any] = []
    send, thread = AbstractConnection.send_packed_command, threading.get_ident()

    def counted(self: AbstractConnection, command: Any, check_health: bool = True) -> None:
        if check_health and threading.get_ident() == thread:
            sent.append(command)
        send(self, command, check_health)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", counted)
        yield sent


def save(api: Api, run: str, name: str, expires_at: float | None = None) -> str:
    """Stores a checkpoint of the run's owner, as a trainer does."""
    owner = json.loads((api.services.records.get("models", run) or {})["owner"])
    path = str(ids.TinkerPath(run, "weights", name))
    made = Checkpoint(owner, run, "weights", BASE, "prefix", 1.0, 1, {"rank": 8}, ["a"], expires_at)
    api.services.records.put_new(Checkpoint.namespace, path, dump(made))
    return path


@pytest.mark.parametrize("name", READS)
def test_a_read_takes_no_more_round_trips_than_its_budget_however_much_it_lists(api: Api, name: str) -> None:
    budget, read = READS[name]
    run = api.model()
    for other in range(1, 6):
        waiting = api.forward_backward(batch(api.model(ids.session_of(run), model_seq_id=other), 1))
        assert waiting.status_code == 200
    for number in range(3):
        save(api, run, f"step-{number}")
        save(api, api.model(), "elsewhere")
    assert read(api, run).status_code == 200
    with round_trips() as sent:
        assert read(api, run).status_code == 200
    assert len(sent) == budget, sent


def test_an_id_that_is_too_long_for_any_record_never_reaches_the_state_server(api: Api) -> None:
    """A batch may bring an id of 64 MiB. A loss that is missing is a 400, because the call consumes its seq."""
    run, long = api.model(), "x" * 100_000
    custom = batch(run, 1, loss_fn="custom")
    custom.loss_fn_config_v2["loss_id"].text = long
    with round_trips() as sent:
        answers = [
            api.forward_backward(batch(long, 1)),
            api.post("forward_backward", {"model_id": long, "seq_id": 1}),
            api.post("optim_step", {"model_id": long, "seq_id": 1, "adam_params": {}}),
            api.forward_backward(custom),
        ]
    assert [answer.status_code for answer in answers] == [404, 404, 422, 400]
    for answer, kind in ((answers[0], "model"), (answers[1], "model"), (answers[3], "loss")):
        assert answer.json["detail"] == f"{kind} {long[:200]!r} does not exist"
    assert sum(len(str(command)) for command in sent) < 10_000


def test_a_key_of_an_account_costs_one_more(api: Api, tenant: Tenant) -> None:
    mine = Api(api.client, api.services, tenant.key("member"))
    run = mine.model()
    with round_trips() as sent:
        assert mine.post("get_info", {"model_id": run}).status_code == 200
    assert len(sent) == 2, sent


def test_a_long_list_of_runs_is_read_some_runs_at_a_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.stores.redis.client._PREFIXES", 2)
    session = api.session()
    runs = [api.model(session, model_seq_id=number) for number in range(5)]
    saved = {run: save(api, run, "last") for run in runs}
    api.get("training_runs")
    with round_trips() as sent:
        listed = api.get("training_runs").json["training_runs"]
    assert {run["training_run_id"]: run["last_checkpoint"]["tinker_path"] for run in listed} == saved
    assert len(sent) == 2 + 3, sent


def test_runs_are_listed_also_by_a_server_that_has_forgotten_its_scripts(api: Api, state_url: str) -> None:
    run = api.model()
    saved = save(api, run, "last")
    with connect(state_url) as client:
        client.script_flush()
    (listed,) = api.get("training_runs").json["training_runs"]
    assert listed["last_checkpoint"]["tinker_path"] == saved


def test_of_a_list_of_checkpoints_only_those_on_the_page_are_read_whole(api: Api, state_url: str) -> None:
    run, now = api.model(), api.services.records.now()
    saved = [save(api, run, f"{number}", now + 60 * number - 30) for number in range(6)]
    with connect(state_url) as client:
        client.config_resetstat()
        listed = api.get("checkpoints?offset=1&limit=2").json
        assert client.info("commandstats")["cmdstat_hgetall"]["calls"] == 2
    assert [one["tinker_path"] for one in listed["checkpoints"]] == saved[2:4], "the first one has expired"
    assert listed["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}


def test_a_checkpoint_that_is_deleted_while_it_is_listed_is_not_shown(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = api.model()
    gone, kept = save(api, run, "gone"), save(api, run, "kept")
    read = RedisRecords.read

    def read_late(self: RedisRecords, *asked: Any) -> Any:
        self.delete(Checkpoint.namespace, gone)
        return read(self, *asked)

    monkeypatch.setattr(RedisRecords, "read", read_late)
    assert [one["tinker_path"] for one in api.get("checkpoints").json["checkpoints"]] == [kept]


def test_the_clock_is_asked_for_once_where_a_checkpoint_expires(api: Api) -> None:
    run = api.model()
    kept, now = save(api, run, "kept"), api.services.records.now()
    save(api, run, "gone", now - 1)
    later = save(api, run, "later", now + 3600)
    api.get(f"training_runs/{run}/checkpoints")
    with round_trips() as sent:
        found = api.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    assert {one["tinker_path"] for one in found} == {kept, later}
    assert len(sent) == 2, sent
