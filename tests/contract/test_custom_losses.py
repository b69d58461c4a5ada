"""Server-side custom losses, against the SDK's own way to run them: forward, loss on the client, backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.contract.data import ADAM, logprobs, sentences, train
from tests.contract.stack import BASE, Stack
from tests.contract.test_numbers import GRADIENT_STEP, reference, weights
from tests.custom_losses import DPO_RANKS, SDFT_RANKS, dpo, sdft
from tests.parity.reference import relative_error


def pairs() -> list[types.Datum]:
    """Chosen and rejected answer end to end, each with its mask, and the reference model's margin."""
    found = []
    for i, tokens in enumerate(sentences(4, seed=4)):
        half = np.arange(len(tokens)) < len(tokens) // 2
        found.append(datum(tokens, np.roll(tokens, -1), chosen=half, rejected=~half, reference=np.array(0.5 - i)))
    return found


def candidates() -> list[types.Datum]:
    """Three candidates per token, with the teacher's scores."""
    generator = np.random.default_rng(5)
    found = []
    for tokens in sentences(4, seed=5):
        targets = np.stack([np.roll(tokens, -1), *generator.integers(3, 300, size=(2, len(tokens)))], axis=1)
        teacher, mask = generator.normal(size=targets.shape), generator.random(len(tokens)) < 0.7
        found.append(datum(tokens, targets, teacher=teacher, mask=mask))
    return found


def datum(tokens: list[int], targets: np.ndarray, **inputs: np.ndarray) -> types.Datum:
    columns = {
        name: types.TensorData(data=value.astype(float).ravel().tolist(), dtype="float32", shape=list(value.shape))
        for name, value in inputs.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": torch.from_numpy(targets), **columns},
    )


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """Trains one of two equal models; B starts at zero, and half of the gradient with it."""
    client = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    train(client, 2)
    return client


@pytest.mark.parametrize(
    ("fn", "ranks", "data"), [(dpo, DPO_RANKS, pairs()), (sdft, SDFT_RANKS, candidates())], ids=["dpo", "sdft"]
)
def test_a_loss_on_the_server_equals_the_same_on_the_client_in_one_pass_instead_of_two(
    service: tinker.ServiceClient,
    stack: Stack,
    tmp_path: Path,
    fn: Any,
    ranks: Mapping[str, Any],
    data: list[types.Datum],
):
    handle = service.create_custom_loss(fn, input_ranks=ranks).result()
    assert handle.loss_id is not None
    here, there = trained(service), trained(service)
    start = weights(reference(there, stack, tmp_path / "start", "start"))
    before = [stack.applied(client.model_id) for client in (here, there)]
    local = here.forward_backward_custom(data, replace(handle, loss_id=None)).result()
    remote = there.forward_backward_custom(data, handle).result()
    after = [stack.applied(client.model_id) for client in (here, there)]
    assert [end - begun for begun, end in zip(before, after, strict=True)] == [2, 1]

    np.testing.assert_allclose(logprobs(remote), logprobs(local), rtol=1e-5)
    names = ["loss:sum", *(name for name in local.metrics if name.startswith("custom/"))]
    assert len(names) == 3
    for name in names:
        assert remote.metrics[name] == pytest.approx(local.metrics[name], rel=1e-5)

    moves = []
    for name, client in (("here", here), ("there", there)):
        client.optim_step(types.AdamParams(**GRADIENT_STEP)).result()
        end = weights(reference(client, stack, tmp_path / name, name))
        moves.append({key: end[key] - value for key, value in start.items()})
    assert relative_error(moves[1], moves[0]) < 1e-5
    assert max(np.abs(move).max() for move in moves[1].values()) > 1e-4


def test_a_custom_loss_that_fails_names_the_datum_and_the_client_goes_on(
    service: tinker.ServiceClient, training: tinker.TrainingClient
):
    def vanishing(logprobs: torch.Tensor, scale: torch.Tensor) -> Any:
        return logprobs.sum() / scale, {}

    handle = service.create_custom_loss(vanishing, input_ranks={"logprobs": 1, "scale": 0}).result()
    rows = [datum(tokens, np.roll(tokens, -1), scale=np.array(i - 1.0)) for i, tokens in enumerate(sentences(3))]
    with pytest.raises(tinker.RequestFailedError, match=r"datum 1: the custom loss vanishing fails: .*not finite"):
        training.forward_backward_custom(rows, handle).result()
    with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
        training.optim_step(ADAM).result()
    assert training.forward(rows[2:], "custom", {"loss_id": handle.loss_id}).result().metrics["loss:sum"] < 0
    training.forward_backward_custom([rows[0], rows[2]], handle).result()
    assert training.optim_step(ADAM).result() is not None
