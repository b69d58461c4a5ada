"""An API process dies in the middle of a call: its client calls again and finds one future, and one effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from app.domain.results import Result
from app.stores.redis.types import Lease
from tests.api_server import ApiServer, serve
from tests.faults import calls
from tests.faults.fuse import BEFORE_DISPATCH, BEFORE_JOURNAL, Fuse
from tests.servers import start_valkey


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[ApiServer]:
    with (
        start_valkey(folder / "valkey") as url,
        serve(folder, url, application="tests.faults.dying_api:application") as server,
    ):
        yield server


def the_call(kind: str, session: str) -> tuple[str, dict[str, Any], str]:
    """(path, body, request id)"""
    model = f"{session}:train:0"
    return {
        "create_model": ("create_model", calls.create_model(session), f"{model}:0"),
        "forward_backward": ("forward_backward", calls.forward_backward(model, 1), f"{model}:1"),
        "optim_step": ("optim_step", calls.optim_step(model, 1), f"{model}:1"),
        "sample": ("asample", calls.sample(session, 5), f"{session}:sample:0:5"),
    }[kind]


def effects(api: ApiServer, kind: str, session: str) -> int:
    """Runs all waiting work as a worker would, and counts it."""
    if kind == "sample":
        entry = api.oplog.claim_sample(f"{session}:sample:0:5", "w/1")
        return int(entry is not None and api.oplog.finish_sample(entry.request_id, Result(b"{}")))
    lease = api.oplog.acquire(f"{session}:train:0", "w/1")
    assert isinstance(lease, Lease)
    seq = lease.applied + 1
    while api.oplog.next(lease, seq):
        api.oplog.commit(lease, seq, Result(b"{}"))
        seq += 1
    return seq - lease.applied - 1


@pytest.mark.parametrize("point", [BEFORE_JOURNAL, BEFORE_DISPATCH])
@pytest.mark.parametrize("kind", ["create_model", "forward_backward", "optim_step", "sample"])
def test_a_call_whose_api_died_has_one_future_and_one_effect(api: ApiServer, folder: Path, kind: str, point: str):
    session = calls.new_session(api)
    assert calls.persist(api, "create_sampling_session", calls.create_sampler(session)).status_code == 200
    if kind in ("forward_backward", "optim_step"):
        assert calls.persist(api, "create_model", calls.create_model(session)).status_code == 200
        assert effects(api, kind, session) == 1
    path, body, request_id = the_call(kind, session)
    fuse = Fuse(folder)
    fuse.set(point)
    with pytest.raises(requests.ConnectionError):
        calls.post(api, path, body)
    assert not fuse.is_set(), "the API died where it should"
    waiting = [p.id for p in api.oplog.pending() if p.id in request_id]
    assert len(waiting) == (point == BEFORE_DISPATCH), "what is journalled is dispatched again, whoever else forgot it"
    for _ in range(2):
        assert calls.persist(api, path, body).json()["request_id"] == request_id
    assert effects(api, kind, session) == 1
    assert [p.id for p in api.oplog.pending() if p.id in request_id] == []
    answer = calls.persist(api, "retrieve_future", {"request_id": request_id})
    assert (answer.status_code, answer.content) == (200, b"{}")
