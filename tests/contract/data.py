"""Small batches for the SDK."""

from __future__ import annotations

import numpy as np
import tinker
from tinker import types
from tinker.types.search_owner import AccessibleSearchOwner

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    """Datum with next-token targets; every position has weight 1 unless `inputs` says otherwise."""
    targets = [*tokens[1:], 1]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets, **(inputs or {"weights": [1.0] * len(tokens)})},
    )


def sentences(count: int = 4, length: int = 12, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 300, size=length + i).tolist() for i in range(count)]


def supervised(count: int = 4, seed: int = 0) -> list[types.Datum]:
    return [datum(tokens) for tokens in sentences(count, seed=seed)]


def policy(count: int = 3, seed: int = 1) -> list[types.Datum]:
    """Datum for policy losses, with behaviour logprobs near those of a random model, so that ratios are near 1."""
    generator = np.random.default_rng(seed)
    rows = []
    for tokens in sentences(count, seed=seed):
        noise = generator.normal(size=len(tokens))
        rows.append(datum(tokens, logprobs=(-5.8 + 0.3 * noise).tolist(), advantages=noise.tolist()))
    return rows


def logprobs(output: types.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([row["logprobs"].to_numpy().ravel() for row in output.loss_fn_outputs])


def project_of(rest: tinker.RestClient, session: str) -> str:
    """The id of the session's project."""
    asked = types.SessionSearchRequest(session_id=session, owner=AccessibleSearchOwner())
    (found,) = rest.search_sessions(asked).result().sessions
    return str(found.project_id)


def train(client: tinker.TrainingClient, steps: int, data: list[types.Datum] | None = None) -> list[float]:
    """Runs pipelined steps, as the cookbook submits them; returns the losses."""
    batch = data or supervised()
    pairs = [(client.forward_backward(batch, "cross_entropy"), client.optim_step(ADAM)) for _ in range(steps)]
    return [forward.result().metrics["loss:sum"] for forward, step in pairs if step.result() is not None]
