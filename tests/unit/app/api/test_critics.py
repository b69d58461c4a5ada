"""Requests for critics: the valid ones, and the calls that must not confuse a critic with a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.domain import ops
from app.domain.losses import CUSTOM, LOSSES
from tests.unit.app.api.test_models import op_of, save_checkpoint
from tests.unit.app.conftest import BASE, Api, batch

VALUES = {"values": [0.1, 0.2, 0.3], "returns": [1.0, 1.0, 1.0], "weights": [0.0, 1.0, 1.0]}
CRITIC: dict[str, Any] = {"model_role": "critic"}
IN_METADATA: dict[str, Any] = {"user_metadata": {"model_role": "critic"}}


@pytest.mark.parametrize("asked", [CRITIC, IN_METADATA, {**CRITIC, **IN_METADATA}])
def test_a_critic_is_asked_for_by_field_or_metadata_and_has_no_pair_on_the_head(
    api: Api, asked: dict[str, Any]
) -> None:
    spec = op_of(api, api.model(**asked)).spec
    assert (spec.critic, spec.lora.train_unembed, spec.lora.train_attn) == (True, False, True)


@pytest.mark.parametrize(
    "asked", [{}, {"model_role": "policy"}, {"model_role": None}, {"user_metadata": {"role": "x"}}]
)
def test_other_models_are_policies(api: Api, asked: dict[str, Any]) -> None:
    assert not op_of(api, api.model(**asked)).spec.critic


BAD_ROLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown": ({"model_role": "reward"}, ["'reward'", "policy or critic"]),
    "unknown in metadata": ({"user_metadata": {"model_role": "Critic"}}, ["'Critic'", "policy or critic"]),
    "no text": ({"user_metadata": {"model_role": ["critic"]}}, ["critic", "unknown"]),
    "two": ({"model_role": "policy", **IN_METADATA}, ["policy", "critic", "user_metadata"]),
    "nothing to train": (
        {**CRITIC, "lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": True}},
        ["nothing to train"],
    ),
}


@pytest.mark.parametrize("case", BAD_ROLES)
def test_a_role_that_is_not_clear_is_refused(api: Api, case: str) -> None:
    change, words = BAD_ROLES[case]
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": BASE, **change}
    answer = api.post("create_model", body)
    assert answer.status_code == 400
    assert all(word in answer.json["detail"] for word in words), answer.json
    assert api.services.oplog.pending() == []


def test_a_critics_batch_is_journalled_with_its_settings_in_full(api: Api) -> None:
    model = api.model(**CRITIC)
    sent = batch(model, 1, loss_fn="ppo_critic", target_tokens=[2, 3, 4], advantages=[1.0] * 3, **VALUES)
    assert api.forward_backward(sent).status_code == 200
    op = op_of(api, model, 1)
    assert (op.loss_fn, op.loss_config) == ("ppo_critic", {"value_clip": 0.2})
    assert set(op.batch.inputs) == {"values", "returns", "weights"}, "other inputs are ignored"


@pytest.mark.parametrize("inputs", [{"target_tokens": [2, 3, 4]}, {"weights": [1.0] * 3}, VALUES])
def test_a_forward_of_a_critic_needs_no_inputs(api: Api, inputs: dict[str, Any]) -> None:
    model = api.model(**CRITIC)
    message = batch(model, 1, loss_fn="ppo_critic", **inputs)
    message.forward_only = True
    assert api.forward_backward(message).status_code == 200
    entry = api.services.oplog.entry(model, 1)
    assert entry is not None
    assert ops.decode(entry.payload).batch.tokens.values.tolist() == [1, 2, 3]


def test_an_input_of_a_forward_is_still_checked(api: Api) -> None:
    message = batch(api.model(**CRITIC), 1, loss_fn="ppo_critic", values=[0.1])
    message.forward_only = True
    answer = api.forward_backward(message)
    assert (answer.status_code, "datum 0: values has shape [1]" in answer.json["detail"]) == (400, True)


@pytest.mark.parametrize("loss_fn", [name for name, spec in LOSSES.items() if not spec.critic and name != CUSTOM])
def test_a_critic_takes_no_loss_of_a_policy(api: Api, loss_fn: str) -> None:
    inputs = {name: [2, 3, 4] if name == "target_tokens" else [1.0] * 3 for name in LOSSES[loss_fn].inputs}
    answer = api.forward_backward(batch(api.model(**CRITIC), 1, loss_fn=loss_fn, **inputs))
    assert answer.status_code == 400
    assert all(word in answer.json["detail"] for word in (loss_fn, "this model is a critic", "ppo_critic"))


def test_a_policy_takes_no_loss_of_a_critic(api: Api) -> None:
    answer = api.forward_backward(batch(api.model(), 1, loss_fn="ppo_critic", **VALUES))
    assert answer.status_code == 400
    assert all(word in answer.json["detail"] for word in ("ppo_critic", "this model is a policy", "cispo"))


def test_there_is_no_entropy_of_values(api: Api) -> None:
    sent = batch(api.model(**CRITIC), 1, loss_fn="ppo_critic", config={"entropy": 1.0}, **VALUES)
    answer = api.forward_backward(sent)
    assert (answer.status_code, "'entropy' is unknown to ppo_critic" in answer.json["detail"]) == (400, True)


@pytest.mark.parametrize("target", [{"path": "a"}, {"sampling_session_seq_id": 3}])
def test_a_critic_is_not_saved_for_a_sampler(api: Api, target: dict[str, Any]) -> None:
    body = {"model_id": api.model(**CRITIC), "seq_id": 1, **target}
    answer = api.post("save_weights_for_sampler", body)
    assert (answer.status_code, "cannot be sampled from" in answer.json["detail"]) == (400, True)


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_a_critics_checkpoint_is_not_sampled_from(api: Api, kind: str) -> None:
    path = save_checkpoint(api, api.model(), kind, critic=True)
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": path}
    answer = api.post("create_sampling_session", body)
    assert (answer.status_code, f"{path} is a critic" in answer.json["detail"]) == (400, True)


@pytest.mark.parametrize("critic", [True, False])
def test_a_model_from_a_checkpoint_has_its_role_and_no_other(api: Api, critic: bool) -> None:
    mine, other = ("critic", "policy") if critic else ("policy", "critic")
    path = save_checkpoint(api, api.model(), critic=critic)
    body = {"session_id": api.session(), "path": path}
    for seq, asked in enumerate(({}, {"model_role": mine}, {"user_metadata": {"model_role": mine}})):
        made = api.post("load_weights", {**body, "model_seq_id": seq, **asked})
        assert made.status_code == 200, made.json
        assert op_of(api, made.json["model_id"]).spec.critic == critic
    for asked in ({"model_role": other}, {"user_metadata": {"model_role": other}}):
        refused = api.post("load_weights", {**body, "model_seq_id": 5, **asked})
        assert (refused.status_code, f"{path} is a checkpoint of a {mine}" in refused.json["detail"]) == (400, True)


@pytest.mark.parametrize("critic", [True, False])
def test_weights_of_the_other_role_are_not_loaded(api: Api, critic: bool) -> None:
    path = save_checkpoint(api, api.model(), critic=not critic)
    model = api.model(model_role="critic" if critic else "policy")
    answer = api.post("load_weights", {"model_id": model, "seq_id": 1, "path": path})
    assert (answer.status_code, "another head" in answer.json["detail"]) == (400, True)


def test_as_many_targets_as_tokens_are_fine(api: Api) -> None:
    wide = {"target_tokens": np.ones((3, 300)), "weights": np.zeros((3, 300))}
    assert api.forward_backward(batch(api.model(), 1, **wide)).status_code == 200
