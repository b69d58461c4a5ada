"""A worker that does not hear of its leases gives them up by itself: someone else may have them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import redis

from workers.leases import LeaseKeeper


class Silent:
    """A journal that is away: the only part of it that a keeper uses."""

    def renew(self, ids: Sequence[str], worker: str) -> list[str]:
        raise redis.ConnectionError("away")


def test_a_keeper_that_hears_nothing_for_a_lease_holds_nothing():
    keeper = LeaseKeeper(Silent(), "a/1", lease_s=0.3)
    keeper.add("model", time.monotonic())
    assert keeper.holds("model")
    deadline = time.monotonic() + 10
    while keeper.holds("model"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    keeper.stop()
