from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import redis

from app.stack import hardware
from app.stores.redis.client import connect
from tests.servers import start_valkey


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(autouse=True)
def no_lease_keeper_is_left() -> Iterator[None]:
    """Checks that each test stops its LeaseKeepers: one that goes on writes to the state server of later tests."""
    before = set(threading.enumerate())
    yield
    assert "leases" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.fixture(autouse=True)
def no_log_of_an_earlier_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps from `caplog` what threads of earlier tests log: one that listens to a state server says that it lost its
    connection when the machine stood still."""
    if "caplog" not in request.fixturenames:
        yield
        return
    earlier = set(threading.enumerate()) - {threading.current_thread()}
    handler = request.getfixturevalue("caplog").handler

    def is_ours(_: logging.LogRecord) -> bool:
        return threading.current_thread() not in earlier

    handler.addFilter(is_ours)
    yield
    handler.removeFilter(is_ours)


@pytest.fixture(autouse=True)
def no_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests choose their GPUs, also on a machine that has some."""
    monkeypatch.setattr(hardware, "NVIDIA_SMI", "no-nvidia-smi")


@pytest.fixture
def client(valkey: str) -> Iterator[redis.Redis]:
    with connect(valkey) as client:
        client.flushall()
        yield client
