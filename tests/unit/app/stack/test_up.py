from __future__ import annotations

import socket

import pytest
import redis

from app.domain.records import LAST_WORKERS, Refusal, Worker
from app.settings import ApiSettings, BaseModelSettings, Settings
from app.stack import up
from app.stack.child import Command
from app.stores.redis.records import RedisRecords


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("host.example", "http://host.example:8000"),
    ],
)
def test_the_url_of_a_ready_stack_is_one_that_this_machine_can_open(host: str, url: str) -> None:
    assert up._local_url(ApiSettings(host=host)) == url


def test_a_new_stack_knows_nothing_of_its_base_models_from_a_former_one(client: redis.Redis) -> None:
    """The settings may give the name to another model."""
    records, here = RedisRecords(client), f"@{socket.gethostname()}"
    for namespace, key in (
        *((Worker.namespace, f"trainer-0{where}") for where in (here, "@elsewhere")),
        *((kind, Refusal.id("trainer", base)) for kind in (Refusal.namespace, LAST_WORKERS) for base in ("a", "b")),
    ):
        records.put(namespace, key, {"role": '"trainer"'})
    settings = Settings(base_models=(BaseModelSettings(name="a", path="a"),))
    up._forget_workers(records, settings, [Command("trainer-0", ("true",), {})])
    left = {
        (kind, key) for kind in (Worker.namespace, Refusal.namespace, LAST_WORKERS) for key, _ in records.list(kind)
    }
    assert left == {
        (Worker.namespace, "trainer-0@elsewhere"),
        (Refusal.namespace, "trainer/b"),
        (LAST_WORKERS, "trainer/b"),
    }
