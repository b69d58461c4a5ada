"""`GET /api/v1/queue` lists the waiting calls of a running stack."""

from __future__ import annotations

from typing import Any

import pytest
import requests
import tinker

from tests.contract.awaiting import await_true
from tests.contract.data import datum, sentences, train
from tests.contract.stack import API_KEY, Stack

# The reader of the queue may get no CPU until the calls have run.
TRIES = 5

pytestmark = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)


def waiting(stack: Stack, model: str) -> list[dict[str, Any]]:
    answer = requests.get(f"{stack.url}/api/v1/queue", headers={"X-API-Key": API_KEY}, timeout=240)
    assert answer.status_code == 200, answer.text
    return [call for call in answer.json()["calls"] if call.get("model_id") == model]


def looks(stack: Stack, training: tinker.TrainingClient) -> list[list[dict[str, Any]]]:
    """Reads the queue again and again while ten calls run."""
    batch = [datum(tokens) for tokens in sentences(count=8, length=300)]
    sent = [training.forward_backward(batch, "cross_entropy").future() for _ in range(10)]
    seen = []
    while not all(call.done() for call in sent):
        seen.append(waiting(stack, training.model_id))
    assert all(call.result() for call in sent)
    return seen


def test_calls_are_seen_in_their_order_until_they_have_run(stack: Stack, training: tinker.TrainingClient):
    train(training, 1)
    await_true(
        lambda: any(one.pace_s > 0 for one in stack.workers() if one.role == "trainer"), "the trainer tells no pace"
    )
    seen, behind = [], []
    for _ in range(TRIES):
        seen += looks(stack, training)
        await_true(lambda: not waiting(stack, training.model_id), "what has run still waits")
        behind = [
            call
            for calls in seen
            for call in calls
            if call.get("position", 0) > 1 and "not arrived" not in call["reason"]
        ]
        if behind:
            break
    assert behind and max(map(len, seen)) > 1, "it was never seen to wait"
    for calls in seen:
        seqs, places = [call["seq_id"] for call in calls], [call["position"] for call in calls if "position" in call]
        assert (seqs, places) == (sorted(seqs), sorted(set(places))), "one behind the other"
    firsts = [calls[0]["seq_id"] for calls in seen if calls]
    assert firsts == sorted(firsts), "and they move on"
    assert all(call["estimated_start_s"] > 0 for call in behind), "at the pace that the trainer tells"
