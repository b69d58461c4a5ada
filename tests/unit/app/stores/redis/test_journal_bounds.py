"""The journal of a model has bounds, on a real server."""

from __future__ import annotations

import pytest

from app.errors import BadRequest
from app.stores.redis import keys
from tests.unit.app.stores.redis.journal_steps import MODEL, admit

MOST_MISSING = 1024


def size(client) -> int:
    return client.dbsize()


def test_a_call_that_leaves_too_many_others_missing_is_a_400_and_stores_nothing(oplog, client):
    admit(oplog, 0)
    before = size(client)
    for seq in (MOST_MISSING + 2, 10**6, 2**31 - 1):
        with pytest.raises(BadRequest, match=f"seq_id {seq} leaves more than 1024 earlier seq_ids"):
            admit(oplog, seq)
    assert size(client) == before


def test_a_refused_call_that_leaves_too_many_others_missing_stores_nothing(oplog, client):
    admit(oplog, 0)
    before = size(client)
    for seq in (MOST_MISSING + 2, 2**31 - 1):
        assert not oplog.refuse(MODEL, seq, "why", "lost_batch")
    assert size(client) == before
    assert oplog.refuse(MODEL, MOST_MISSING + 1, "why", "lost_batch")


def test_the_parts_of_a_large_call_may_come_before_its_first_part(oplog):
    admit(oplog, 0)
    for seq in range(MOST_MISSING + 1, 1, -1):
        admit(oplog, seq)
    admit(oplog, 1)


def test_calls_that_wait_in_a_row_are_not_missing(oplog, client):
    """A client may send any number of calls before the first one has run."""
    client.zadd(keys.journal(MODEL), {str(seq): seq for seq in range(5 * MOST_MISSING)})
    admit(oplog, 5 * MOST_MISSING)
