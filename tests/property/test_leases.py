"""A worker that cannot renew its leases gives them up by itself, because another worker may have them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import redis

from workers.process.liveness import LeaseKeeper


class Silent:
    """A journal that is down: the only part of it that a keeper uses."""

    def renew(self, ids: Sequence[str], worker: str) -> list[str]:
        raise redis.ConnectionError("away")


def test_a_keeper_without_an_answer_for_a_lease_time_holds_no_lease():
    brief, long = (LeaseKeeper(Silent(), "a/1", lease_s) for lease_s in (0.3, 3600.0))
    for keeper in (brief, long):
        keeper.add("model", time.monotonic())
    deadline = time.monotonic() + 60
    while brief.holds("model"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert long.holds("model")
    for keeper in (brief, long):
        keeper.stop()
