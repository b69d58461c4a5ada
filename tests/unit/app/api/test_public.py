"""A published checkpoint can be read and loaded by everybody with a key, and changed by its owner alone.

Nobody without a key can read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
from tinker.types.training_run import TrainingRun
from tinker.types.weights_info_response import WeightsInfoResponse
from werkzeug.test import TestResponse

from app.domain.ops import LoraSpec
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import Api

Ask = Callable[[Api, str, str], TestResponse]


def publish(api: Api, path: str, method: str = "POST") -> int:
    url = f"/api/v1/training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}/publish"
    return api.client.open(url, method=method, headers={"X-API-Key": api.key}).status_code


def _load_into_a_new_one(api: Api, run: str, path: str) -> TestResponse:
    return api.post("load_weights", {"session_id": api.session(), "model_seq_id": 0, "path": path})


def _load(api: Api, run: str, path: str) -> TestResponse:
    """Loads the checkpoint. The refusal is a 400 and not a 404, because the call has consumed its seq."""
    return api.post("load_weights", {"model_id": api.model(), "seq_id": 1, "path": path})


def _sample(api: Api, run: str, path: str) -> TestResponse:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": path}
    return api.post("create_sampling_session", body)


READS: dict[str, Ask] = {
    "weights_info": lambda api, run, path: api.post("weights_info", {"tinker_path": path}),
    "a new model": _load_into_a_new_one,
    "a model": _load,
    "a sampler": _sample,
    "its run": lambda api, run, path: api.get(f"training_runs/{run}?access_scope=accessible"),
    "the run's checkpoints": lambda api, run, path: api.get(f"training_runs/{run}/checkpoints"),
    "files": lambda api, run, path: api.get(
        f"training_runs/{run}/checkpoints/external_weights/a/external_weights_urls"
    ),
    "its archive": lambda api, run, path: api.get(f"training_runs/{run}/checkpoints/external_weights/a/archive"),
}


@pytest.mark.parametrize("read", READS)
def test_it_is_read_by_a_stranger_as_long_as_it_is_public(api: Api, stranger: Api, read: str) -> None:
    run = api.model()
    path = save_checkpoint(api, run, "external_weights")
    refused = READS[read](stranger, run, path)
    assert refused.status_code == (400 if read == "a model" else 404)
    assert publish(api, path) == 200
    assert READS[read](stranger, run, path).status_code == (302 if read == "its archive" else 200)
    assert publish(api, path, "DELETE") == 200
    assert READS[read](stranger, run, path).status_code == refused.status_code


def test_a_private_one_looks_missing_to_whoever_asks_what_it_holds(api: Api, stranger: Api) -> None:
    path = save_checkpoint(api, api.model())
    foreign = stranger.post("weights_info", {"tinker_path": path})
    api.services.records.delete("checkpoints", path)
    assert foreign.data == api.post("weights_info", {"tinker_path": path}).data


def test_only_its_owner_changes_it_though_all_may_read_it(api: Api, stranger: Api) -> None:
    path = save_checkpoint(api, api.model())
    publish(api, path)
    url = f"/api/v1/training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"
    headers = {"X-API-Key": stranger.key}
    answers = [
        stranger.client.delete(url, headers=headers),
        stranger.client.delete(f"{url}/publish", headers=headers),
        stranger.client.put(f"{url}/ttl", headers=headers, json={"ttl_seconds": 3600}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert api.post("weights_info", {"tinker_path": path}).status_code == 200


def test_publishing_again_is_fine_and_is_seen_in_the_lists(api: Api) -> None:
    path = save_checkpoint(api, api.model())
    assert api.get("checkpoints").json["checkpoints"][0]["public"] is False
    assert [publish(api, path), publish(api, path)] == [200, 200]
    assert api.get("checkpoints").json["checkpoints"][0]["public"] is True
    assert [publish(api, path, "DELETE"), publish(api, path, "DELETE")] == [200, 200]


def test_a_public_one_that_expired_is_there_for_nobody(api: Api, stranger: Api) -> None:
    path = save_checkpoint(api, api.model(), public=True, expires_at=1.0)
    assert [who.post("weights_info", {"tinker_path": path}).status_code for who in (api, stranger)] == [404, 404]


def test_of_a_run_a_stranger_sees_what_was_published_and_not_the_rest(api: Api, stranger: Api) -> None:
    run = api.model()
    save_checkpoint(api, run)
    public = save_checkpoint(api, run, "external_weights", public=True)
    seen = stranger.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    assert [found["tinker_path"] for found in seen] == [public]
    described = stranger.get(f"training_runs/{run}?access_scope=accessible").json
    assert "last_checkpoint" not in described or described["last_checkpoint"] is None
    assert stranger.get(f"training_runs/{run}").status_code == 404
    assert stranger.get("training_runs?access_scope=accessible").json["training_runs"] == []
    assert stranger.get("checkpoints").json["checkpoints"] == []


def test_of_a_runs_owner_and_metadata_nothing_is_published_with_a_checkpoint(api: Api, stranger: Api) -> None:
    run = api.model(user_metadata={"wandb_link": "https://wandb.example/secret"})
    save_checkpoint(api, run, user_metadata={"private": "yes"})
    save_checkpoint(api, run, "external_weights", public=True, user_metadata={"step": "7"})
    seen = stranger.get(f"training_runs/{run}?access_scope=accessible")
    own = api.get(f"training_runs/{run}?access_scope=accessible").json
    assert own["model_owner"] and own["project_id"]
    assert own["user_metadata"] == {"wandb_link": "https://wandb.example/secret"}
    assert not [text for text in (own["model_owner"], own["project_id"], "wandb", "private") if text in seen.text]
    shown = TrainingRun.model_validate(seen.json)
    assert (shown.base_model, shown.is_lora, shown.lora_rank) == ("org/tiny", True, 4)
    assert (shown.user_metadata, shown.model_owner) == ({"step": "7"}, "")


def test_a_public_checkpoint_that_outlives_its_run_is_described(api: Api, stranger: Api) -> None:
    run = api.model()
    save_checkpoint(api, run, public=True)
    api.services.records.delete("models", run)
    assert stranger.get(f"training_runs/{run}?access_scope=accessible").json["last_checkpoint"]["public"]


def test_weights_info_says_what_a_model_must_be_to_load_it(api: Api) -> None:
    path = save_checkpoint(api, api.model())
    info = WeightsInfoResponse.model_validate(api.post("weights_info", {"tinker_path": path}).json)
    assert (info.base_model, info.is_lora, info.lora_rank) == ("org/tiny", True, 4)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)
    for lacking in ("train_attn", "train_mlp", "train_unembed"):
        partial = save_checkpoint(api, api.model(), lora=asdict(LoraSpec(4, **{lacking: False})))
        groups = {"train_attn": True, "train_mlp": True, "train_unembed": True, lacking: False}
        assert groups.items() <= api.post("weights_info", {"tinker_path": partial}).json.items()
    whole = save_checkpoint(api, api.model(), lora={})
    info = WeightsInfoResponse.model_validate(api.post("weights_info", {"tinker_path": whole}).json)
    assert (info.is_lora, info.lora_rank) == (False, None)
