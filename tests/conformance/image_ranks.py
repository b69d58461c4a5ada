"""Program of test_image_ranks.py: one batch of text and images, in one process or in each rank of a group."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from app.domain.ops import ForwardBackward, LoraSpec
from app.settings import BaseModelSettings
from tests.conformance.training_ranks import STEP, note
from tests.parity.datums import batch, supervised
from tests.pictures import PLACEHOLDER, image
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

# The datum with the image is the longest, so it is in the first micro-batch and alone there. The second has text alone,
# and the third of the first batch is one rank's: the other one keeps step.
_LENGTHS = (60, 50, 40)


def seen() -> ForwardBackward:
    datums = supervised(1, _LENGTHS, vocab=PLACEHOLDER)
    one = image(24, 16, 1, datum=0, position=5)
    datums[0]["tokens"][5 : 5 + one.tokens] = 0
    return ForwardBackward(replace(batch(datums), images=(one,)), "cross_entropy")


def run(backend: Trainer) -> dict[str, np.ndarray]:
    """Two passes with images and one of text alone. Returns the results by name."""
    found: dict[str, np.ndarray] = {}
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1))})
    for turn, op in enumerate((seen(), ForwardBackward(batch(supervised(2, (9, 7))), "cross_entropy"), seen())):
        note(found, f"turn {turn}", backend.apply({"a": op}))
        found |= {f"grad {turn} {name}": g for name, g in backend.gradients("a").items()}
        backend.apply({"a": STEP})
    return found


def main(settings: str, folder: str) -> None:
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    backend.open()  # together
    if os.environ["RANK"] != "0":
        backend.follow()
        ranks.end()
    np.savez(Path(folder) / "found.npz", **run(backend))
    backend.shutdown()
    ranks.end()
