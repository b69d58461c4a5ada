"""Every outage of the state server is a 503, never a 500: the SDK then calls again."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from app import create_app
from app.api.base import EXTENSION
from app.domain.results import Result
from app.errors import SetupError
from app.settings import RedisSettings, Settings
from app.stores.redis.client import connect, is_outage
from tests.servers import MAX_MEMORY, free_port, start_valkey, valkey_binary
from tests.unit.app.conftest import Api, add_worker, batch


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A separate state server, because these tests take it down."""
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="module")
def own_api(settings: Settings, own_url: str) -> Api:
    app = create_app(settings.model_copy(update={"redis": RedisSettings(url=own_url)}))
    services = app.extensions[EXTENSION]
    for role in ("trainer", "sampler"):
        add_worker(services, role)
    return Api(app.test_client(), services)


@pytest.fixture
def server(own_url: str) -> Iterator[redis.Redis]:
    with connect(own_url) as client:
        yield client
        client.replicaof("NO", "ONE")
        client.config_set("min-replicas-to-write", 0)
        client.config_set("maxmemory", MAX_MEMORY)


def make_full(server: redis.Redis) -> None:
    server.config_set("maxmemory", 1)


def make_read_only(server: redis.Redis) -> None:
    server.replicaof("127.0.0.1", "1")


def make_lonely(server: redis.Redis) -> None:
    server.config_set("min-replicas-to-write", 1)


@pytest.mark.parametrize("spoil", [make_full, make_read_only, make_lonely])
def test_a_server_that_may_not_write_is_a_503_that_uses_up_no_seq(
    own_api: Api, server: redis.Redis, spoil: Callable[[redis.Redis], None]
) -> None:
    model = own_api.model()
    spoil(server)
    for message in (batch(model, 1), batch(model, 1, loss_fn="hinge")):
        answer = own_api.forward_backward(message)
        assert (answer.status_code, answer.json["error"]) == (503, "Unavailable")
        assert 10 * float(answer.headers["Retry-After"]) >= 50, (
            "the SDK gives some calls ten more tries, whatever we say"
        )
    server.replicaof("NO", "ONE")
    server.config_set("min-replicas-to-write", 0)
    server.config_set("maxmemory", MAX_MEMORY)
    assert own_api.forward_backward(batch(model, 1, tokens=[3, 2, 1])).status_code == 200


@pytest.mark.parametrize("spoil", [make_full, make_read_only, make_lonely])
def test_what_such_a_server_answers_to_a_plain_write_is_an_outage(
    server: redis.Redis, spoil: Callable[[redis.Redis], None]
) -> None:
    """A script of the journal may refuse in its own words before the server does."""
    spoil(server)
    with pytest.raises(redis.RedisError) as caught:
        server.set("a", 1)
    assert is_outage(caught.value)


def test_a_server_in_a_long_script_is_a_503(own_api: Api, server: redis.Redis, own_url: str) -> None:
    model = own_api.model()
    server.config_set("busy-reply-threshold", 1)
    # Redis reports a running script even to the health check that `connect` makes after a pause.
    with connect(own_url) as other, redis.Redis.from_url(own_url, health_check_interval=0) as killer:
        assert killer.ping()
        spinner = threading.Thread(target=_spin, args=(other,))
        spinner.start()
        deadline = time.monotonic() + 60
        while (status := own_api.forward_backward(batch(model, 1)).status_code) == 200:
            assert time.monotonic() < deadline
        killer.script_kill()
        spinner.join(60)
    assert status == 503


def test_a_server_that_still_loads_is_an_outage(tmp_path: Path) -> None:
    with start_valkey(tmp_path) as url, connect(url) as client:
        client.mset({f"key{i}": "x" for i in range(30_000)})
        client.save()
    port = free_port()
    slowly = ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]  # us a key
    command = [valkey_binary(), "--port", str(port), "--dir", tmp_path, *slowly]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, retry=None) as client:
            error = _first_answer(client)
    finally:
        process.kill()
        process.wait()
    assert isinstance(error, redis.BusyLoadingError)
    assert is_outage(error)


@pytest.mark.parametrize(
    "answer",
    [
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write.",
        "BUSY Valkey is busy running a script.",
    ],
)
def test_an_answer_redis_py_has_no_class_for_is_an_outage_too(answer: str) -> None:
    assert is_outage(redis.ResponseError(answer))


def test_a_fault_of_ours_is_none() -> None:
    assert not is_outage(redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"))
    assert not is_outage(redis.ResponseError("user_script:3: attempt to index a nil value"))


def test_a_full_server_still_answers_polls(own_api: Api, server: redis.Redis) -> None:
    model = own_api.model()
    request_id = own_api.forward_backward(batch(model, 1)).json["request_id"]
    own_api.commit(model, 1, Result(b"done"))
    make_full(server)
    answer = own_api.post("retrieve_future", {"request_id": request_id})
    assert (answer.status_code, answer.data) == (200, b"done")


def _first_answer(client: redis.Redis) -> redis.RedisError | None:
    """Answer to a write as soon as the server listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            client.set("a", 1)
            return None
        except redis.BusyLoadingError as error:
            return error
        except (redis.ConnectionError, redis.TimeoutError):
            assert time.monotonic() < deadline


def _spin(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)


def test_a_server_that_came_back_and_may_lose_calls_is_a_503_with_the_reason(own_api: Api, server: redis.Redis) -> None:
    model = own_api.model()
    server.config_set("appendonly", "no")
    server.client_kill_filter(_type="normal", skipme=True)
    answers = [own_api.forward_backward(batch(model, 1)) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {503}
    assert "set appendonly yes" in answers[-1].json["detail"]
    server.config_set("appendonly", "yes")
    assert own_api.forward_backward(batch(model, 1)).status_code == 200


def test_an_api_does_not_start_on_a_server_that_may_lose_calls(
    settings: Settings, server: redis.Redis, own_url: str
) -> None:
    server.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(SetupError, match="set maxmemory-policy noeviction"):
            create_app(settings.model_copy(update={"redis": RedisSettings(url=own_url)}))
    finally:
        server.config_set("maxmemory-policy", "noeviction")
