from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from app.stores.redis.client import connect
from tests.servers import start_valkey


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def client(valkey: str) -> Iterator[redis.Redis]:
    with connect(valkey) as client:
        client.flushall()
        yield client
