"""The examples of the API's description are one story, which the API takes and answers word for word."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from app.api.examples import BASE_MODEL, SESSION_ID
from app.domain.ops import Ragged
from app.domain.results import PROTOBUF, ForwardBackwardOutput, Result
from app.wire.results import encode_forward_backward
from tests.unit.app.api.openapi_examples import EXAMPLES
from tests.unit.app.conftest import API, BASE, KEY, Api, add_worker

# Tests beside those of their routes play them.
OF_OTHER_CLIENTS = {
    *("/oai/api/v1/chat/completions", "/oai/api/v1/completions"),
    *("/anthropic/api/v1/messages", "/anthropic/api/v1/messages/count_tokens"),
}
CONTEXT = 8192


class Reader:
    """A reader of the page, who sends each example with the id of the reader's own session."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.session = SESSION_ID
        self.tried: set[str] = set()

    def sends(self, call: str, status: int = 200) -> Any:
        """Sends a call's example. Returns the answer with the example's ids, after comparing it with the example's."""
        path = f"{API}/{call}"
        self.tried.add(path)
        headers = {"X-API-Key": KEY, "Accept": "application/json", "Content-Type": "application/json"}
        body, answers = EXAMPLES[path]
        method = "GET" if body is None else "POST"
        answer = self.api.client.open(path, method=method, data=self._own(json.dumps(body)), headers=headers)
        assert answer.status_code == status, answer.text
        if call == "create_session":
            self.session = answer.json["session_id"]
        shown = answer.text.replace(self.session, SESSION_ID).replace(BASE, BASE_MODEL)
        assert json.loads(shown) == answers[str(status)]
        return answer.json

    def _own(self, text: str) -> str:
        return text.replace(SESSION_ID, self.session).replace(BASE_MODEL, BASE)


@pytest.fixture
def reader(api: Api, monkeypatch: pytest.MonkeyPatch) -> Reader:
    # A snapshot of the queue that an earlier test took knows none of these calls.
    monkeypatch.setattr("app.services.queue._STATE_SNAPSHOT_AGE_S", -1.0)
    for role in ("trainer", "sampler"):
        add_worker(api.services, role, CONTEXT)
    return Reader(api)


def test_the_examples_in_their_order_get_the_answers_that_they_show(reader: Reader) -> None:
    reader.sends("get_server_capabilities")
    reader.sends("create_session")
    model = reader.sends("create_model")["model_id"]
    reader.api.commit(model, 0)
    reader.sends("forward_backward")
    reader.sends("retrieve_future", 408)
    output = ForwardBackwardOutput(Ragged.of([np.array([-2.5, -1.5, -0.5])], np.float32), {"loss:sum": 2.0})
    reader.api.commit(model, 1, Result(encode_forward_backward(output), PROTOBUF))
    reader.sends("retrieve_future")
    reader.sends("optim_step")
    reader.api.commit(model, 2)
    reader.sends("save_weights")
    reader.sends("create_sampling_session")
    reader.sends("asample")
    assert reader.tried | OF_OTHER_CLIENTS == EXAMPLES.keys(), "play every example"
