"""Captured answers: prompts and their sampled tokens, as datums to train on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class CapturedSequence:
    """One sampled sequence: its token ids, the stop token included, and the logprob of each."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Capture:
    """One answered sampling request. `created` is in unix seconds by the state server's clock. `model` is a base model
    or the path of a checkpoint."""

    id: str
    created: float
    model: str
    prompt: Sequence[int]
    sequences: Sequence[CapturedSequence]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        fields = json.loads(content)
        return cls(**{**fields, "sequences": [CapturedSequence(**each) for each in fields["sequences"]]})

    @property
    def tokens(self) -> int:
        """The tokens of all datums."""
        return sum(len(self.prompt) + len(sequence.tokens) for sequence in self.sequences)

    def datums(self) -> Iterator[dict[str, Any]]:
        """A datum of each sequence, in the API's JSON. `weights` are 1 at the tokens that were sampled and 0 at the
        prompt, where `logprobs` are 0 too."""
        before = len(self.prompt) - 1
        for sequence in self.sequences:
            whole = [*self.prompt, *sequence.tokens]
            inputs = {
                "target_tokens": _tensor(whole[1:], "int64"),
                "weights": _tensor([0.0] * before + [1.0] * len(sequence.tokens), "float32"),
                "logprobs": _tensor([0.0] * before + [*sequence.logprobs], "float32"),
            }
            yield {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": whole[:-1]}]},
                "loss_fn_inputs": inputs,
            }


def _tensor(values: Sequence[float], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}
