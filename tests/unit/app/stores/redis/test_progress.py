"""A run's progress is written with the commit, is bounded, and is gone with the run."""

from __future__ import annotations

import json

import pytest

from app.domain.progress import Point, Recorded
from app.domain.records import Model
from app.errors import Fenced
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, own

MOST = 1000
GRADIENT = Point("forward_backward", {"loss:sum": 1.5}, tokens=7, weight=3.0, seconds=0.25)
STEP = Point("optim_step", {"grad_norm": 2.0}, seconds=0.125)


def committed(oplog, points):
    lease = own(oplog)
    for seq, point in enumerate(points):
        admit(oplog, seq, point.kind)
        oplog.commit(lease, seq, OK, (), "", {}, point)
    return lease


def test_a_commit_counts_its_step_or_its_tokens_and_keeps_its_point(oplog, client):
    committed(oplog, [GRADIENT, GRADIENT, STEP])
    [found] = RedisRecords(client).progress([MODEL], 10)
    assert (found.steps, found.trained_tokens) == (1, 14)
    assert [(point.seq, point.kind) for point in found.points] == [
        (0, GRADIENT.kind),
        (1, GRADIENT.kind),
        (2, STEP.kind),
    ]
    first, *_, last = found.points
    assert (first.metrics, first.tokens, first.weight, first.seconds) == ({"loss:sum": 1.5}, 7, 3.0, 0.25)
    assert (last.metrics, last.tokens) == ({"grad_norm": 2.0}, 0)
    assert 0 <= RedisRecords(client).now() - last.at < 3600 and first.at <= last.at


def test_a_point_of_a_newer_worker_is_read(oplog, client):
    committed(oplog, [STEP])
    point = {"metrics": {"grad_norm": 4.0}, "learnt_later": 1}
    client.xadd(keys.progress(MODEL), {"seq": 1, "kind": STEP.kind, "point": json.dumps(point)})
    [found] = RedisRecords(client).progress([MODEL], 1)
    assert found.points[0].metrics == {"grad_norm": 4.0}


def test_metrics_of_a_client_are_kept_in_their_order_and_bounded(oplog, client):
    committed(oplog, [STEP])
    records = RedisRecords(client)
    records.record(MODEL, [Recorded(step, {"reward": step / 2}) for step in range(600)])
    records.record(MODEL, [Recorded(step, {"reward": step / 2}) for step in range(600, MOST + 5)])
    none, found = records.recorded(["unknown", MODEL])
    assert none == [] and found == [Recorded(step, {"reward": step / 2}) for step in range(5, MOST + 5)]
    assert 29 < client.ttl(keys.recorded(MODEL)) / (24 * 3600) <= 30
    [progress] = records.progress([MODEL], MOST)
    assert len(progress.points) == 1, "they take no place of those of training"


@pytest.mark.parametrize("ends", ["ends", "deleted"])
def test_metrics_of_a_client_are_gone_with_the_run_and_none_are_added(oplog, client, ends):
    committed(oplog, [STEP])
    records = RedisRecords(client)
    records.record(MODEL, [Recorded(1, {"reward": 1.0})])
    if ends == "ends":
        RedisLifecycle(client, EngineSettings()).end_model(MODEL)
    else:
        records.delete(Model.namespace, MODEL)
    records.record(MODEL, [Recorded(2, {"reward": 1.0})])
    assert records.recorded([MODEL]) == [[]] and not client.exists(keys.recorded(MODEL))


def test_points_are_kept_for_a_month_after_the_last(oplog, client):
    committed(oplog, [GRADIENT, STEP])
    assert 29 < client.ttl(keys.progress(MODEL)) / (24 * 3600) <= 30


def test_the_newest_points_are_read_and_an_unknown_run_has_none(oplog, client):
    committed(oplog, [GRADIENT, STEP, GRADIENT])
    [unknown, found] = RedisRecords(client).progress(["other:train:0", MODEL], 2)
    assert [point.seq for point in found.points] == [1, 2] and found.trained_tokens == 14
    assert (unknown.steps, unknown.trained_tokens, unknown.points) == (0, 0, [])


def test_a_fenced_commit_leaves_no_point_and_counts_nothing(oplog, client):
    admit(oplog, 0)
    former = own(oplog, "a/1")
    lease = own(oplog, "a/2")
    with pytest.raises(Fenced):
        oplog.commit(former, 0, OK, (), "", {}, GRADIENT)
    oplog.commit(lease, 0, OK, (), "", {}, GRADIENT)
    with pytest.raises(Fenced):
        oplog.commit(lease, 0, OK, (), "", {}, GRADIENT)
    [found] = RedisRecords(client).progress([MODEL], 10)
    assert found.trained_tokens == 7 and len(found.points) == 1


def test_only_the_newest_points_are_kept(oplog, client):
    with client.pipeline() as pipe:
        for number in range(MOST):
            pipe.xadd(keys.progress(MODEL), {"seq": number}, id=f"1-{number + 1}")
        pipe.execute()
    committed(oplog, [GRADIENT])
    assert client.xlen(keys.progress(MODEL)) == MOST
    assert client.xrange(keys.progress(MODEL), count=1)[0][0] == b"1-2", "the oldest is gone"


def test_it_is_gone_with_its_run(oplog, client):
    committed(oplog, [GRADIENT])
    assert client.exists(keys.progress(MODEL))
    RedisLifecycle(client, EngineSettings()).end_model(MODEL)
    assert not client.exists(keys.progress(MODEL))


def test_what_a_process_of_an_earlier_version_left_is_gone_with_the_runs_record(oplog, client):
    committed(oplog, [GRADIENT])
    RedisRecords(client).update(Model.namespace, MODEL, {"ended": "deleted"})
    RedisRecords(client).delete(Model.namespace, MODEL)
    assert not client.exists(keys.progress(MODEL))
