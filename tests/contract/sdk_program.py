"""A user program that every SDK since 0.6 can run: train, save, restore, sample, list, download.

It runs in its own process, with the `tinker` that comes first on its path. The arguments are the server's URL, a key
and a base model. Its observations go to stdout as one line of JSON.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import urllib.request
from typing import Any

import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
TOKENS = [[7 * i + 11 * j + 3 for j in range(12 + i)] for i in range(4)]


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    targets = {"target_tokens": [*tokens[1:], 1], **(inputs or {"weights": [1.0] * len(tokens)})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=targets)


def scores(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [row["logprobs"].to_numpy().tolist() for row in output.loss_fn_outputs]


def trained(training: tinker.TrainingClient) -> dict[str, Any]:
    """Trains with steps submitted before the results of earlier ones, with every kind of loss that an SDK has."""
    batch = [datum(tokens) for tokens in TOKENS]
    before = training.forward(batch, "cross_entropy").result()
    policy = [datum(tokens, logprobs=[-5.8] * len(tokens), advantages=[0.1] * len(tokens)) for tokens in TOKENS]
    calls = []
    for data, loss in [(batch, "cross_entropy")] * 3 + [(policy, "importance_sampling")]:
        calls.append((training.forward_backward(data, loss), training.optim_step(ADAM)))
    losses = [call.result().metrics["loss:sum"] for call, step in calls if step.result() is not None]

    def loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum((row * row).sum() for row in logprobs), {"rows:sum": float(len(logprobs))}

    custom = training.forward_backward_custom(batch, loss).result().metrics
    training.optim_step(ADAM).result()
    # SDKs up to 0.25 report the loss of the server-side stand-in as the custom loss itself.
    stand_in = custom.get("surrogate_loss:sum", custom["loss:sum"])
    return {"before": scores(before), "losses": losses, "custom": [stand_in, custom["rows:sum"]]}


def restored(training: tinker.TrainingClient) -> dict[str, Any]:
    """Restores the saves in this client and returns the results."""
    batch = [datum(tokens) for tokens in TOKENS]
    path = training.save_state("state").result().path
    saved = scores(training.forward(batch, "cross_entropy").result())
    training.forward_backward(batch, "cross_entropy")
    training.optim_step(ADAM).result()
    training.load_state(path).result()
    return {"path": path, "saved": saved, "loaded": scores(training.forward(batch, "cross_entropy").result())}


def sampled(training: tinker.TrainingClient) -> dict[str, Any]:
    client = training.save_weights_and_get_sampling_client(name="sampled")
    prompt = types.ModelInput.from_ints(TOKENS[0])
    params = types.SamplingParams(max_tokens=5, seed=3, temperature=0.7)
    answer = client.sample(prompt, num_samples=2, sampling_params=params).result()
    top = client.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    return {
        "tokens": [list(s.tokens) for s in answer.sequences],
        "logprobs": [list(s.logprobs or []) for s in answer.sequences],
        "reasons": [s.stop_reason for s in answer.sequences],
        "prompt": client.compute_logprobs(prompt).result(),
        "top": top.topk_prompt_logprobs,
    }


def looked(service: tinker.ServiceClient, training: tinker.TrainingClient, path: str) -> dict[str, Any]:
    """Lists runs and checkpoints by REST. An SDK that can download archives also does so."""
    rest = service.create_rest_client()
    run = path.removeprefix("tinker://").split("/")[0]
    seen: dict[str, Any] = {
        "base": rest.get_training_run(run).result().base_model,
        "tokenizer": len(training.get_tokenizer()),
        "listed": [found.tinker_path for found in rest.list_checkpoints(run).result().checkpoints],
    }
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
        with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as archive:
            seen["archive"] = archive.getnames()
    rest.delete_checkpoint_from_tinker_path(path).result()
    seen["left"] = len(rest.list_checkpoints(run).result().checkpoints)
    return seen


def main(url: str, key: str, base: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(base_model=base, rank=8, seed=3)
    seen = {"version": tinker.__version__, **trained(training), **restored(training), **sampled(training)}
    seen |= looked(service, training, seen["path"])
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
