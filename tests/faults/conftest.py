from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.settings import StoreSettings
from app.stores.redis.client import connect
from tests.faults.world import World
from tests.models import tiny_qwen3
from tests.servers import start_valkey
from tests.servers_s3 import start_s3

NewWorld = Callable[..., World]


@pytest.fixture(scope="package")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in memory, if there is room (tests/conftest.py).

    On a shared disk the fsyncs of some hundred runs took ten times as long as all else.
    """
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="package")
def valkey(memory: Path) -> Iterator[str]:
    with start_valkey(memory / "valkey") as url:
        yield url


@pytest.fixture(scope="module")
def server(memory: Path) -> Iterator[StoreSettings]:
    """An S3 server."""
    with start_s3(memory / "s3") as settings:
        yield settings


@pytest.fixture
def new_world(memory: Path, valkey: str, base_path: Path) -> Iterator[NewWorld]:
    """Makes worlds with the given store and engine settings; all their workers end with the test."""
    with connect(valkey) as client:
        client.flushall()
    worlds: list[World] = []

    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as folder:

        def make(
            redis_url: str = valkey, store: dict[str, str] | None = None, store_url: str = "", **engine: Any
        ) -> World:
            worlds.append(World(Path(folder), redis_url, base_path, store or {}, store_url, engine))
            return worlds[-1]

        yield make
        for world in worlds:
            world.close()
