"""Lists of models in Anthropic's form."""

from __future__ import annotations

from urllib.parse import quote

from tests.unit.app.api.chat.anthropic.caller import URL, Anthropic
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE


def test_each_listed_model_is_retrieved_and_no_other(anthropic: Anthropic):
    path = save_checkpoint(anthropic.api, anthropic.api.model(), "sampler_weights")
    listed = anthropic.api.client.get(f"{URL}/models?limit=1000", headers=anthropic.headers).json
    assert [model["id"] for model in listed["data"]] == [BASE, path]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (BASE, path, False)
    for model in listed["data"]:
        answer = anthropic.api.client.get(f"{URL}/models/{quote(model['id'], safe='')}", headers=anthropic.headers)
        assert answer.json == model
    missing = anthropic.api.client.get(f"{URL}/models/claude-opus-4", headers=anthropic.headers)
    assert (missing.status_code, missing.json["error"]["type"]) == (404, "not_found_error")


def test_a_model_says_when_it_was_made(anthropic: Anthropic):
    save_checkpoint(anthropic.api, anthropic.api.model(), "sampler_weights", created=86400.5)
    base, tuned = anthropic.api.client.get(f"{URL}/models", headers=anthropic.headers).json["data"]
    assert base["created_at"] == "1970-01-01T00:00:00Z", "as Anthropic's API writes an unknown time"
    assert tuned["created_at"] == "1970-01-02T00:00:00Z"
    assert {base["type"], tuned["type"]} == {"model"}


def test_without_a_sampler_no_model_is_listed(anthropic: Anthropic):
    anthropic.api.services.records.delete("workers", "sampler-0")
    listed = anthropic.api.client.get(f"{URL}/models", headers=anthropic.headers).json
    assert listed == {"data": [], "has_more": False, "first_id": None, "last_id": None}
