"""Two live workers never have the name of one node; a worker that restarts gets its name back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import redis

from app.errors import SetupError
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from tests.servers import free_port
from workers.process import node_name

NODE, QUEUE = "trainer-0@host", "train.base"
LEASE_S = 0.5
ELSEWHERE = {"machine": "another", "pid": 1, "born": "1"}


def oplog(client: redis.Redis, lease_s: float = 3600.0) -> RedisOpLog:
    return RedisOpLog(client, EngineSettings(lease_s=lease_s))


def holder(client: redis.Redis) -> str:
    return client.hget("tinsmith:nodes", NODE).decode()


def claim_of(log: RedisOpLog, boot: str, process: dict[str, object]) -> None:
    """Claims the name for another process."""
    claim = json.dumps({"worker": f"{NODE}/{boot}", "queue": QUEUE, **process})
    assert log.claim_node(NODE, f"{NODE}/{boot}", claim) == ""


def test_a_live_worker_of_this_machine_keeps_its_name_and_the_refusal_names_its_process(client: redis.Redis):
    log = oplog(client)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        claim_of(log, "a", node_name._process(other.pid))
        before = holder(client)
        with pytest.raises(SetupError, match=rf"{NODE} \(process {other.pid} on this machine\): stop it.*--name"):
            node_name.claim(log, f"{NODE}/b", QUEUE, 3600.0, ending_s=0.1)
        assert holder(client) == before


def test_a_process_of_this_machine_that_is_still_ending_is_waited_for(client: redis.Redis):
    log = oplog(client)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        claim_of(log, "a", node_name._process(other.pid))
        ends = threading.Timer(0.6, other.communicate, [b"\n"])
        ends.start()
        node_name.claim(log, f"{NODE}/b", QUEUE, 3600.0, ending_s=60.0)
        ends.join()
    assert f"{NODE}/b" in holder(client)


def test_an_ended_process_of_this_machine_is_replaced_although_its_lease_still_runs(client: redis.Redis):
    log = oplog(client)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        claim_of(log, "a", node_name._process(other.pid))
        other.kill()
        other.wait()
        node_name.claim(log, f"{NODE}/b", QUEUE, 3600.0)
    assert f"{NODE}/b" in holder(client)


def test_a_later_process_with_the_same_number_is_not_taken_for_it(client: redis.Redis):
    log = oplog(client)
    claim_of(log, "a", {**node_name._process(os.getpid()), "born": "1"})
    node_name.claim(log, f"{NODE}/b", QUEUE, 3600.0)
    assert f"{NODE}/b" in holder(client)


def test_a_worker_elsewhere_has_its_name_until_it_is_not_heard_for_a_lease(client: redis.Redis):
    log = oplog(client, LEASE_S)
    claim_of(log, "a", ELSEWHERE)
    node_name.claim(log, f"{NODE}/b", QUEUE, LEASE_S)
    assert f"{NODE}/b" in holder(client)
    assert not client.exists(keys.lease(f"{NODE}/a")), "the lease of the former had ended"


def test_a_worker_elsewhere_that_goes_on_renewing_its_lease_is_refused(client: redis.Redis):
    log, long, over = oplog(client, LEASE_S), oplog(client, 3600.0), threading.Event()
    claim_of(log, "a", ELSEWHERE)

    def renew() -> None:
        while not over.wait(0.05):
            long.renew([], f"{NODE}/a")

    long.renew([], f"{NODE}/a")
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(SetupError, match="on another machine or in a container"):
            node_name.claim(log, f"{NODE}/b", QUEUE, LEASE_S)
    finally:
        over.set()
        thread.join()


def test_a_worker_starts_while_the_state_server_is_away():
    node_name.claim(oplog(connect(f"redis://127.0.0.1:{free_port()}/0")), f"{NODE}/b", QUEUE, LEASE_S)
