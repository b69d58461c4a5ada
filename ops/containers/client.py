"""A user program for the SDK, and all results it gets. They are the same in every run."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

import tinker
from tinker import types

from ops.containers import stack
from tests.contract.data import ADAM, datum, logprobs, sentences

URL = "http://localhost:8000"
BASE = "Qwen/Qwen3-0.6B"
STEPS = 40
# A call that takes this long is lost: the longest outage here takes a minute.
_PATIENCE_S = 600.0
_ROWS, _LENGTH = 8, 24


@dataclass
class Played:
    """All results of a run of the program. `run` and the paths differ between runs, the rest must not."""

    run: str = field(compare=False)
    losses: list[float] = field(default_factory=list)
    samples: list[tuple[list[int], list[float]]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """Logprobs of a new run that begins at the checkpoint."""
    checkpoint: str = field(default="", compare=False)
    weights: str = field(default="", compare=False)


def connect() -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=URL, api_key=stack.secret("TINSMITH_API_KEY"))


def rest() -> tinker.RestClient:
    return tinker.RestClient(base_url=URL, api_key=stack.secret("TINSMITH_API_KEY"))


def play(after_step: Callable[[int], None] = lambda step: None) -> Played:
    """Trains, samples, saves, loads; `after_step` is called with the number of steps done, from 1 on."""
    with connect() as service:
        client = create(service)
        played = Played(client.model_id)
        for step in range(1, STEPS + 1):
            played.losses.append(train(client))
            after_step(step)
            if step == STEPS // 2:
                played.samples += sample(client.save_weights_and_get_sampling_client().result(_PATIENCE_S))
                played.checkpoint = client.save_state("half").result(_PATIENCE_S).path
        played.weights = client.save_weights_for_sampler("end").result(_PATIENCE_S).path
        played.samples += sample_from(service, played.weights)
        played.scores = score_from(service, played.checkpoint)
        return played


def create(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """Creates the same adapter every time."""
    return service.create_lora_training_client(base_model=BASE, rank=8, seed=7).result(_PATIENCE_S)


def train(client: tinker.TrainingClient) -> float:
    """Runs one step, always on the same batch; returns its loss."""
    backward = client.forward_backward(_batch(), "cross_entropy")
    client.optim_step(ADAM).result(_PATIENCE_S)
    loss: float = backward.result(_PATIENCE_S).metrics["loss:sum"]
    return loss


def sample(client: tinker.SamplingClient) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and logprobs of two sequences."""
    prompt = types.ModelInput.from_ints(sentences(1)[0])
    params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=11)
    found = client.sample(prompt, 2, params).result(_PATIENCE_S).sequences
    return [(list(sequence.tokens), list(sequence.logprobs or ())) for sequence in found]


def score(client: tinker.TrainingClient) -> list[float]:
    """Returns the logprobs of the batch."""
    scores: list[float] = logprobs(client.forward(_batch(), "cross_entropy").result(_PATIENCE_S)).tolist()
    return scores


def sample_from(service: tinker.ServiceClient, weights: str) -> list[tuple[list[int], list[float]]]:
    """The same samples from saved weights."""
    return sample(service.create_sampling_client(model_path=weights).result(_PATIENCE_S))


def score_from(service: tinker.ServiceClient, checkpoint: str) -> list[float]:
    """Logprobs of the batch, by a new run that starts from the checkpoint."""
    return score(service.create_training_client_from_state_with_optimizer(checkpoint).result(_PATIENCE_S))


def download(training: tinker.TrainingClient) -> dict[str, int]:
    """Sizes in bytes of the files that a client downloads from the object store through the API, by name."""
    path = training.save_weights_external("home").result(_PATIENCE_S).path
    sizes = {}
    for name, url in rest().get_external_weights_urls(path).result().urls.items():
        with urllib.request.urlopen(url) as answer:
            sizes[name] = len(answer.read())
    return sizes


def _batch() -> list[types.Datum]:
    return [datum(tokens) for tokens in sentences(_ROWS, _LENGTH, seed=3)]
