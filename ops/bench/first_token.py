"""Latency that the service adds to the first token of a sample, on a model with almost no compute.

Requests run one at a time. `python -m ops.bench.first_token BASE_MODEL_JSON` is the bare side: it calls the sampler's
backend directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from app import ids
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings
from ops.bench import batches, models, servers, side, timing
from ops.bench.client import Client
from ops.bench.report import Goal, Outcome
from workers.backends.sampling.backends import create

_GOAL_MS = 15.0
# A step this small gains nothing from a second thread, which would take the API's core on a two-core machine.
_THREADS = 1
_ROUNDS, _CALLS = 10, 20
_PROMPT_TOKENS = 32


def prompt() -> np.ndarray:
    tokens: np.ndarray = batches.random_tokens(1, _PROMPT_TOKENS, models.TINY_VOCAB_SIZE)[0]
    return tokens


def run(folder: Path) -> Outcome:
    base = models.tiny(folder / "base")
    with (
        side.threads(_THREADS),
        servers.running_stack(folder, base) as stack,
        side.running("ops.bench.first_token", base.model_dump_json(), folder / "bare.log") as bare,
    ):
        http = _Http(stack.url, base.name)
        sides: dict[str, Callable[[], Any]] = {
            "http": lambda: [timing.timed_ms(http.sample) for _ in range(_CALLS)],
            "bare": lambda: bare.measure(_CALLS),
        }
        timing.alternate(1, sides)
        return _outcome(timing.alternate(_ROUNDS, sides))


class _Http:
    """A sampling session of the base model, on one connection."""

    def __init__(self, url: str, base: str) -> None:
        self._client = Client(url)
        session = self._client.call("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
        self._client.call("create_sampling_session", asked)
        self._sampler, self._seq = ids.sampling_session_id(session, 0), 0

    def sample(self) -> None:
        asked = {
            "sampling_session_id": self._sampler,
            "seq_id": self._seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt().tolist()}]},
            "sampling_params": {"max_tokens": 1},
        }
        self._seq += 1
        self._client.result(self._client.call("asample", asked)["request_id"])


def prepare() -> Callable[[int], list[float]]:
    """Returns measure(count): ms of each request."""
    backend = create(BaseModelSettings.model_validate_json(sys.argv[1]))
    backend.open()
    request = SampleRequest(prompt(), num_samples=1, max_tokens=1, seed=0)
    return lambda count: [timing.timed_ms(lambda: backend.sample(None, request)) for _ in range(count)]


def _outcome(rounds: Mapping[str, Sequence[Sequence[float]]]) -> Outcome:
    p50s = {name: [median(samples) for samples in found] for name, found in rounds.items()}
    added = [ours - floor for ours, floor in zip(p50s["http"], p50s["bare"], strict=True)]
    figures: dict[str, Any] = {
        "rounds": _ROUNDS,
        "calls_a_round": _CALLS,
        "threads": _THREADS,
        "added_ms": {"p50": median(added), "best_round_p50": min(added)},
        **{f"{name}_ms": timing.summary([ms for one in found for ms in one]) for name, found in rounds.items()},
    }
    return Outcome(figures, (Goal("first token: added p50", median(added), "at_most", _GOAL_MS, "ms"),))


if __name__ == "__main__":
    side.serve(prepare)
