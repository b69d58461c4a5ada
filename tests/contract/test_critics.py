"""A critic through the real SDK: requested by metadata, read by `forward`, trained, saved, resumed; not sampled."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types

from tests.contract.data import ADAM, sentences, supervised
from tests.contract.stack import BASE, Stack

ROLE = {"model_role": "critic"}
TOKENS = sentences()
RETURNS = [np.linspace(-1, 1, len(tokens), dtype=np.float32) for tokens in TOKENS]


@pytest.fixture
def critic(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE, rank=8, seed=3, user_metadata=ROLE).result()


def datums(**inputs: list[np.ndarray]) -> list[types.Datum]:
    """Datums of the sentences, with each input's array."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={name: arrays[i] for name, arrays in inputs.items()},
        )
        for i, tokens in enumerate(TOKENS)
    ]


def values(critic: tinker.TrainingClient) -> list[np.ndarray]:
    """Values for a rollout: they need no returns yet."""
    output = critic.forward(datums(), "ppo_critic").result()
    assert output.metrics["loss:sum"] == 0.0
    return [row["values"].to_numpy() for row in output.loss_fn_outputs]


def learn(critic: tinker.TrainingClient, steps: int) -> list[float]:
    """Mean squared errors, each with the values of its own rollout."""
    errors = []
    for _ in range(steps):
        old = values(critic)
        ones = [np.ones_like(row) for row in old]
        batch = datums(values=old, returns=RETURNS, weights=ones)
        metrics = critic.forward_backward(batch, "ppo_critic", {"value_clip": 0.5}).result().metrics
        critic.optim_step(ADAM).result()
        errors.append(metrics["squared_error:sum"] / metrics["loss_tokens:sum"])
    return errors


def test_a_critic_learns_its_returns_and_gives_a_value_for_each_token(critic: tinker.TrainingClient):
    assert [row.shape for row in values(critic)] == [(len(tokens),) for tokens in TOKENS]
    errors = learn(critic, 5)
    assert errors[-1] < 0.7 * errors[0]


def test_a_saved_critic_goes_on_where_it_was(critic: tinker.TrainingClient, service: tinker.ServiceClient):
    learn(critic, 2)
    path = critic.save_state("here").result().path
    successors = [
        service.create_training_client_from_state_with_optimizer(path).result(),
        service.create_training_client_from_state_with_optimizer(path, user_metadata=ROLE).result(),
    ]
    ends = [learn(client, 1) and values(client) for client in (critic, *successors)]
    for end in ends[1:]:
        assert all(np.array_equal(one, same) for one, same in zip(end, ends[0], strict=True))
    critic.load_state(path).result()
    assert not np.array_equal(values(critic)[0], ends[0][0])


def test_what_is_for_a_policy_is_refused_and_the_critic_lives_on(
    critic: tinker.TrainingClient, training: tinker.TrainingClient, service: tinker.ServiceClient, stack: Stack
):
    with pytest.raises(tinker.BadRequestError, match="this model is a critic"):
        critic.forward_backward(supervised(), "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="this model is a policy"):
        training.forward(datums(), "ppo_critic").result()
    with pytest.raises(tinker.BadRequestError, match="cannot be sampled from"):
        critic.save_weights_for_sampler("sampler").result()
    path = critic.save_state("mine").result().path
    with pytest.raises(tinker.BadRequestError, match="is a critic"):
        service.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.BadRequestError, match="another head"):
        training.load_state(path).result()
    assert len(learn(critic, 1)) == 1
