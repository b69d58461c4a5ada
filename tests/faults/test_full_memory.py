"""R11: the state server fills up. New work is refused for now, everything else goes on, nothing is lost or evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from werkzeug.test import TestResponse

from app import create_app
from app.api.base import EXTENSION
from app.domain.records import Worker
from app.domain.results import Result
from app.settings import BaseModelSettings, EngineSettings, RedisSettings, Settings, hash_key
from app.stores.redis.client import connect
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.servers import start_valkey
from tests.unit.app.conftest import BASE, KEY, Api, add_worker, batch
from workers.maintenance.spilling import PayloadSpilling

MAX_MEMORY = 24 * 2**20
SOFT = EngineSettings().memory_share
OWNER = "node/test"
PIECE = b"x" * 128 * 1024


class FullServer:
    """A state server that foreign keys fill up."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        client.config_set("maxmemory", MAX_MEMORY)
        client.config_set("maxmemory-policy", "noeviction")
        self._pieces = 0

    def fill_to_soft_limit(self) -> None:
        """Fills a little beyond the limit, because the buffers of the connections grow and shrink."""
        while self._used() < (SOFT + 0.05) * MAX_MEMORY:
            self._add()
        assert self._used() < 0.95 * MAX_MEMORY

    def fill_to_hard_limit(self) -> None:
        """Fills a little beyond the limit, so that work that drains meanwhile makes no room."""
        with pytest.raises(redis.OutOfMemoryError):
            while True:
                self._add()
        beyond = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], ARGV[1])"
        self.client.eval(beyond, 1, "foreign:beyond", PIECE * 8)

    def free(self) -> None:
        self.client.delete(*self.client.keys("foreign:*"))

    def evicted(self) -> int:
        return self.client.info("stats")["evicted_keys"]

    def _add(self) -> None:
        self.client.set(f"foreign:{self._pieces}", PIECE)
        self._pieces += 1

    def _used(self) -> int:
        return self.client.info("memory")["used_memory"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FullServer]:
    with start_valkey(tmp_path / "valkey") as url, connect(url) as client:
        yield FullServer(client)


@pytest.fixture
def api(server: FullServer, tmp_path: Path) -> Api:
    port = server.client.connection_pool.connection_kwargs["port"]
    settings = Settings(
        data_dir=tmp_path,
        api_keys=(hash_key(KEY),),
        redis=RedisSettings(url=f"redis://127.0.0.1:{port}/0"),
        engine=EngineSettings(lease_s=600),  # longer than any test: no worker renews it
        base_models=(BaseModelSettings(name=BASE, path=str(tmp_path)),),
    )
    app = create_app(settings)
    api = Api(app.test_client(), app.extensions[EXTENSION])
    for role in ("trainer", "sampler"):
        add_worker(api.services, role)
    return api


class Run:
    """A model with an owner, a sampler, waiting calls (seqs 1 to 6, samples 0 to 3), and calls not yet made."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.session = api.session()
        self.model = api.model(self.session)
        self.sampler = api.sampler()
        self.oplog, self.records = api.services.oplog, api.services.records
        self.owner = self.records.get("models", self.model)["owner"]
        for seq in range(1, 7):
            assert api.forward_backward(batch(self.model, seq)).status_code == 200
        for seq in range(4):
            assert self.sample(seq).status_code == 200
        self.lease = self.own(OWNER)

    def own(self, worker: str) -> Lease:
        """Owns the model, from any process of the only node."""
        lease = self.oplog.acquire(self.model, worker)
        assert isinstance(lease, Lease)
        return lease

    def sample(self, seq: int) -> TestResponse:
        prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
        return self.api.post("asample", {"sampling_session_id": self.sampler, "seq_id": seq, "prompt": prompt})

    def new_work(self) -> dict[str, Callable[[], TestResponse]]:
        """Makes only new calls; the batch of the last call is large enough to be staged."""
        model = {"session_id": self.session, "model_seq_id": 1, "base_model": BASE}
        sampler = {"session_id": self.session, "sampling_session_seq_id": 1, "base_model": BASE}
        step: dict[str, Any] = {"model_id": self.model, "seq_id": 8, "adam_params": {"learning_rate": 0.1}}
        return {
            "forward_backward": lambda: self.api.forward_backward(batch(self.model, 7)),
            "optim_step": lambda: self.api.post("optim_step", step),
            "sample": lambda: self.sample(10),
            "create_model": lambda: self.api.post("create_model", model),
            "create_sampling_session": lambda: self.api.post("create_sampling_session", sampler),
            "create_session": lambda: self.api.post("create_session", {}),
            "large batch": lambda: self.api.forward_backward(large_batch(self.model, 9)),
        }

    def put_off(self) -> None:
        before = self.there()
        for name, call in self.new_work().items():
            answer = call()
            assert (answer.status_code, answer.json["error"]) == (503, "Unavailable"), name
            assert 0 < float(answer.headers["Retry-After"]) <= 60, name
        assert self.there() == before, "nothing is consumed, registered or left behind"

    def goes_on(self, step: int) -> None:
        """Checks repeats, reads, and one step of every kind of work."""
        waiting = self.lease.applied + step
        assert self.api.forward_backward(batch(self.model, 6)).json["request_id"] == f"{self.model}:6"
        assert self.sample(3).json["request_id"] == f"{self.sampler}:3"
        assert self.api.get(f"samplers/{self.sampler}").status_code == 200
        assert self.api.post("get_info", {"model_id": self.model}).status_code == 200
        assert self.api.post("session_heartbeat", {"session_id": self.session}).status_code == 200
        assert self.oplog.renew([self.model], OWNER) == []
        assert self.oplog.lead("sweeper", OWNER)
        self.records.put(Worker.namespace, "w", dump(Worker("trainer", BASE, {}, {}, "", 0.0)), ttl_s=60)
        assert self.oplog.next(self.lease, waiting) is not None
        written = ("checkpoints", f"tinker://{self.model}/weights/{step}", {"owner": self.owner})
        self.oplog.commit(self.lease, waiting, Result(b"%d" % step), [written])
        assert self.result(f"{self.model}:{waiting}") == b"%d" % step
        assert self.records.get(*written[:2]) == written[2]
        entry = self.oplog.claim_sample(f"{self.sampler}:{step}", OWNER)
        assert entry is not None and entry.payload
        assert self.oplog.finish_sample(entry.request_id, Result(b"sample %d" % step))
        assert self.result(entry.request_id) == b"sample %d" % step

    def changes_owner(self) -> None:
        """Another worker takes the model, and a snapshot trims its journal."""
        applied = self.own("node/next").applied
        self.lease = self.own(OWNER)
        assert self.lease.applied == applied
        assert self.oplog.set_snapshot(self.lease, applied, "s") == ""

    def result(self, request_id: str) -> bytes:
        answer = self.api.post("retrieve_future", {"request_id": request_id})
        assert answer.status_code == 200
        return answer.data

    def there(self) -> set[bytes]:
        with connect(self.api.services.settings.redis.url) as client:
            names = {key for key in client.keys("tinsmith:*") if b":lease:" not in key}
            return {b"%s %d" % (key, client.zcard(key) if b":journal:" in key else 0) for key in names}


def large_batch(model: str, seq: int) -> Any:
    message = batch(model, seq)
    for _ in range(2000):
        message.data.add().CopyFrom(message.data[0])
    return message


def test_a_full_state_server_puts_new_work_off_and_drains(api: Api, server: FullServer) -> None:
    run = Run(api)
    server.fill_to_soft_limit()
    run.put_off()
    run.goes_on(1)
    not_refused = api.forward_backward(batch(run.model, 20, loss_fn="hinge"))
    assert not_refused.status_code == 503, "a 400 would have to be remembered"

    server.fill_to_hard_limit()
    run.put_off()
    run.goes_on(2)
    run.changes_owner()
    not_refused = api.forward_backward(batch(run.model, 21, loss_fn="hinge"))
    assert not_refused.status_code == 503

    server.free()
    for name, call in run.new_work().items():
        assert call().status_code == 200, name
    assert api.forward_backward(batch(run.model, 21)).status_code == 200
    run.lease = run.own(OWNER)
    for step in range(1, 8):
        assert run.oplog.next(run.lease, run.lease.applied + step) is not None
        run.oplog.commit(run.lease, run.lease.applied + step, Result(b"%d" % step))
    assert run.result(f"{run.model}:1") == b"1"
    assert run.result(f"{run.model}:9") == b"7"
    assert server.evicted() == 0


def test_the_op_others_wait_for_comes_in_above_the_soft_limit(api: Api, server: FullServer) -> None:
    model = api.model()
    assert api.forward_backward(batch(model, 2)).status_code == 200
    server.fill_to_soft_limit()
    assert api.forward_backward(batch(model, 3)).status_code == 503
    assert api.forward_backward(batch(model, 1)).status_code == 200


def test_large_results_leave_room_for_everybody(api: Api, server: FullServer) -> None:
    """Twice the server's memory in results that nobody reads."""
    services = api.services
    spilling = PayloadSpilling(RedisPayloads(server.client, services.settings.engine, services.objects))
    model, body = api.model(), b"x" * 2**20
    lease = services.oplog.acquire(model, OWNER)
    assert isinstance(lease, Lease)
    for seq in range(1, 1 + 2 * MAX_MEMORY // len(body)):
        assert api.forward_backward(batch(model, seq)).status_code == 200
        services.oplog.commit(lease, seq, Result(body))
        spilling.sweep()
    for seq in (1, 2 * MAX_MEMORY // len(body)):
        assert api.post("retrieve_future", {"request_id": f"{model}:{seq}"}).data == body
