"""One model's journal, advanced by hand."""

from __future__ import annotations

from app.domain.results import Result
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Lease

MODEL = "session:train:0"
OK = Result(b"{}")


def admit(oplog: RedisOpLog, seq: int, kind: str = "forward_backward", content: str = "") -> str:
    return oplog.admit(MODEL, seq, kind, b"payload %d" % seq, content or f"digest {seq}").request_id


def own(oplog: RedisOpLog, worker: str = "a/1") -> Lease:
    lease = oplog.acquire(MODEL, worker)
    assert isinstance(lease, Lease)
    return lease


def commit_through(oplog: RedisOpLog, lease: Lease, last: int) -> None:
    for seq in range(lease.applied + 1, last + 1):
        oplog.commit(lease, seq, OK)
