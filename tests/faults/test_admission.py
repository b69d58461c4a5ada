"""One call makes one future: from either of two API processes, and through kill -9 of the state server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.domain.records import Checkpoint
from app.domain.results import Result
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.api_server import BASE, ApiServer, serve
from tests.faults import calls
from tests.servers import free_port, start_valkey


class Site:
    """Two API processes on one state server, which can be killed and restarted on the same files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._port, self._state = folder, free_port(), ExitStack()
        stack.callback(self._state.close)
        url = self._start()
        self.apis = [stack.enter_context(serve(folder, url)) for _ in range(2)]

    def kill_state_server(self) -> None:
        self._state.close()  # SIGKILL

    def start_state_server(self) -> None:
        self._start()

    def _start(self) -> str:
        return self._state.enter_context(start_valkey(self._folder / "valkey", self._port))

    def everywhere(self, path: str, body: dict[str, Any]) -> set[tuple[int, str]]:
        """Asks each process; returns their (status, body), one element if they agree."""
        answers = [calls.persist(api, path, body) for api in self.apis]
        return {(answer.status_code, answer.text) for answer in answers}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("site"), stack)


@pytest.fixture
def session(site: Site) -> str:
    return calls.new_session(site.apis[0])


def statuses(answers: set[tuple[int, str]]) -> set[int]:
    return {status for status, _ in answers}


def put_checkpoint(api: ApiServer, session: str) -> str:
    path = f"tinker://{session}:train:0/sampler_weights/a"
    owner = api.oplog._redis.hget(f"tinsmith:sessions:{session}", "owner").decode().strip('"')
    prefix = f"models/{session}:train:0/sampler_weights/a/1-1"
    stored = Checkpoint(owner, f"{session}:train:0", "sampler_weights", BASE, prefix, 0.0, 1, {"rank": 4}, [])
    api.records.put(Checkpoint.namespace, path, dump(stored))
    return path


Call = tuple[str, dict[str, Any]]
Keyed = Callable[[str, str], tuple[Call, Call]]
# Each: the call, and another one under the same key. Both get the session and the path of a checkpoint.
KEYS: dict[str, Keyed] = {
    "session, model_seq_id": lambda session, path: (
        ("create_model", calls.create_model(session)),
        ("create_model", calls.create_model(session, rank=8)),
    ),
    "model, seq_id": lambda session, path: (
        ("forward_backward", calls.forward_backward(f"{session}:train:0", 1)),
        ("forward_backward", calls.forward_backward(f"{session}:train:0", 1, token=9)),
    ),
    "model, seq_id of another kind": lambda session, path: (
        ("optim_step", calls.optim_step(f"{session}:train:0", 1)),
        ("forward_backward", calls.forward_backward(f"{session}:train:0", 1)),
    ),
    "session, sampling_session_seq_id": lambda session, path: (
        ("create_sampling_session", calls.create_sampler(session)),
        ("create_sampling_session", calls.create_sampler(session, model_path=path)),
    ),
    "sampling session, seq_id": lambda session, path: (
        ("asample", calls.sample(session, 5)),
        ("asample", calls.sample(session, 5, token=2)),
    ),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_repeat_has_the_same_id_and_other_content_is_a_400(site: Site, session: str, key: str):
    path = put_checkpoint(site.apis[0], session)
    (route, call), (other_route, other) = KEYS[key](session, path)
    if key.startswith("model"):
        calls.persist(site.apis[0], "create_model", calls.create_model(session))
    if key.startswith("sampling session"):
        calls.persist(site.apis[0], "create_sampling_session", calls.create_sampler(session))
    first = calls.persist(site.apis[0], route, call)
    assert first.status_code == 200
    for restart in (False, True):
        if restart:
            site.kill_state_server()
            site.start_state_server()
        assert site.everywhere(route, call) == {(200, first.text)}
        assert statuses(site.everywhere(other_route, other)) == {400}
        assert site.everywhere(route, call) == {(200, first.text)}


def test_a_refused_seq_stays_refused(site: Site, session: str):
    model = f"{session}:train:0"
    calls.persist(site.apis[0], "create_model", calls.create_model(session))
    assert (
        calls.persist(site.apis[0], "forward_backward", calls.forward_backward(model, 1, loss_fn="no")).status_code
        == 400
    )
    for restart in (False, True):
        if restart:
            site.kill_state_server()
            site.start_state_server()
        answers = site.everywhere("forward_backward", calls.forward_backward(model, 1))
        assert statuses(answers) == {400}
        assert all("was refused" in text for _, text in answers)


def test_while_the_state_server_is_dead_a_call_is_a_503_that_uses_nothing_up(site: Site, session: str):
    model = f"{session}:train:0"
    calls.persist(site.apis[0], "create_model", calls.create_model(session))
    site.kill_state_server()
    away = [
        calls.post(api, "forward_backward", body)
        for api in site.apis
        for body in (calls.forward_backward(model, 1), calls.forward_backward(model, 1, loss_fn="no"))
    ]
    site.start_state_server()
    assert {(answer.status_code, "Retry-After" in answer.headers) for answer in away} == {(503, True)}
    answers = site.everywhere("forward_backward", calls.forward_backward(model, 1, token=7))
    assert statuses(answers) == {200}
    assert all(f'"{model}:1"' in text for _, text in answers)


def test_a_poll_through_a_death_of_the_state_server_finds_its_result(site: Site, session: str):
    """Acknowledged results are there again, and a poll is asked to retry until then."""
    request_id = calls.persist(site.apis[0], "create_model", calls.create_model(session)).json()["request_id"]
    site.kill_state_server()
    answers = [calls.post(api, "retrieve_future", {"request_id": request_id}) for api in site.apis]
    assert {(answer.status_code, "Retry-After" in answer.headers) for answer in answers} == {(503, True)}
    site.start_state_server()
    oplog = site.apis[0].oplog
    lease = oplog.acquire(f"{session}:train:0", "w/1")
    assert isinstance(lease, Lease)
    oplog.commit(lease, 0, Result(b'{"a": 1}'))
    assert site.everywhere("retrieve_future", {"request_id": request_id}) == {(200, '{"a": 1}')}
