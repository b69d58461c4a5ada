"""Datums with images against transformers + PEFT: each datum alone, with the processor's own pixels and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain import ops
from app.domain.images import Image
from app.domain.ops import AdamParams, Batch, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import ForwardBackwardOutput
from app.errors import UserOpError
from tests import pictures
from tests.parity.datums import Datum, batch, supervised
from tests.parity.reference import DecaysSummedInFp64, Reference, relative_error
from tests.parity.training import open_trainer, state
from tests.pictures import PLACEHOLDER, image
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

# Text alone, an image in the middle, two images and text, an image at the start, an image at the end, text alone.
LENGTHS = (13, 20, 31, 12, 9, 21)
IMAGES = (
    image(24, 16, 1, datum=1, position=5),
    image(16, 16, 2, datum=2, position=2),
    image(40, 11, 3, datum=2, position=9),
    image(9, 33, 4, datum=3, position=0, form="jpeg"),
    image(16, 8, 5, datum=4, position=7),
)


class Seen(dict[str, np.ndarray]):
    """A datum with its images."""

    images: Sequence[Image] = ()


class SeeingReference(Reference):
    """transformers' model with the processor's pixels, and its own placeholders in the place of an image's tokens."""

    def logits(self, datum: Datum) -> Tensor:
        tokens = torch.from_numpy(datum["tokens"].astype(np.int64))[None]
        if not datum.images:
            return self.model(tokens).logits[0]
        is_image = torch.zeros_like(tokens)
        for one in datum.images:
            is_image[:, one.position : one.position + one.tokens] = 1
        decoded = [pictures.decoded(one) for one in datum.images]
        made = pictures.processor()(images=decoded, return_tensors="pt")
        return self.model(tokens.masked_fill(is_image.bool(), PLACEHOLDER), mm_token_type_ids=is_image, **made).logits[
            0
        ]


def datums(seed: int) -> list[Seen]:
    found = [Seen(datum) for datum in supervised(seed, LENGTHS, vocab=PLACEHOLDER)]
    for i, datum in enumerate(found):
        datum.images = [one for one in IMAGES if one.datum == i]
        for one in datum.images:
            datum["tokens"][one.position : one.position + one.tokens] = 0
    return found


def seen_batch(found: Sequence[Seen]) -> Batch:
    return replace(batch(found), images=IMAGES)


def op(seed: int) -> ForwardBackward:
    return ForwardBackward(seen_batch(datums(seed)), "cross_entropy")


@pytest.fixture(scope="module", params=pictures.FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.tiny_reader(request.param, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.tiny_reader("qwen3-vl", tmp_path_factory.mktemp("vl"))


def trained(base: Path) -> Trainer:
    """A trainer with a model "m" after a step, so that its B is no longer zero."""
    trainer = open_trainer(base)
    trainer.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    trainer.apply({"m": op(0)})
    trainer.apply({"m": OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))})
    return trainer


def test_logprobs_and_gradients_of_text_and_images_in_one_pass_equal_the_reference(base: Path, tmp_path: Path) -> None:
    trainer = trained(base)
    trainer.capture("m", optimizer=False)(tmp_path)
    reference = SeeingReference(base, tmp_path)

    with DecaysSummedInFp64():
        output = trainer.apply({"m": op(9)})["m"]
        reference.backward(datums(9), "cross_entropy")
    assert isinstance(output, ForwardBackwardOutput), output
    for found, wanted in zip(output.logprobs, reference.forward(datums(9)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert relative_error(trainer.gradients("m"), reference.gradients()) < 1e-5
    assert not any("visual" in name for name in trainer.gradients("m")), "the tower has no adapter"


def test_a_replay_from_the_journals_bytes_gives_the_same_bits(base: Path, tmp_path: Path) -> None:
    first, again = trained(base), trained(base)
    live = first.apply({"m": op(9)})["m"]
    replayed = again.apply({"m": ops.decode(ops.encode(op(9)))})["m"]
    assert live.logprobs.values.tobytes() == replayed.logprobs.values.tobytes()
    assert state(first, "m", tmp_path / "a") == state(again, "m", tmp_path / "b")


def test_an_image_changes_what_follows_it_and_nothing_before(vl: Path) -> None:
    trainer = trained(vl)
    other = replace(IMAGES[0], data=image(24, 16, 77).data)
    changed = ForwardBackward(replace(seen_batch(datums(9)), images=(other, *IMAGES[1:])), "cross_entropy", {}, True)
    before, after = (trainer.apply({"m": one})["m"] for one in (replace(op(9), forward_only=True), changed))
    for i, (one, two) in enumerate(zip(before.logprobs, after.logprobs, strict=True)):
        same = one == two
        assert same.all() if i != 1 else same[:5].all() and not same[5:].any()


def test_an_op_with_images_and_another_models_text_share_a_pass(vl: Path, tmp_path: Path) -> None:
    trainer = trained(vl)
    trainer.apply({"n": Create(LoraSpec(rank=8, seed=2))})
    text = ForwardBackward(batch(supervised(5, (17, 8))), "cross_entropy")
    alone = {m: trainer.apply({m: replace(one, forward_only=True)})[m] for m, one in (("m", op(9)), ("n", text))}
    trainer.apply({"m": op(9), "n": text})
    together = {m: trainer.gradients(m) for m in ("m", "n")}
    trainer.apply({m: ops.DropGradients() for m in ("m", "n")})
    for model, one in (("m", op(9)), ("n", text)):
        output = trainer.apply({model: one})[model]
        np.testing.assert_allclose(output.logprobs.values, alone[model].logprobs.values, rtol=1e-5, atol=1e-5)
        assert relative_error(together[model], trainer.gradients(model)) < 1e-5


def test_the_merged_model_reads_images_too(vl: Path, tmp_path: Path) -> None:
    trainer = trained(vl)
    trainer.capture("m", optimizer=False)(tmp_path)
    merged = tmp_path / "merged"
    merged.mkdir()
    trainer.export("m")(merged)
    fresh = open_trainer(merged)
    fresh.apply({"m": Create(LoraSpec(rank=1))})
    one, two = (each.apply({"m": replace(op(9), forward_only=True)})["m"] for each in (trainer, fresh))
    np.testing.assert_allclose(one.logprobs.values, two.logprobs.values, rtol=1e-5, atol=1e-5)


WRONG = {
    "truncated": (replace(IMAGES[1], data=IMAGES[1].data[:-200]), "cannot be decoded"),
    "another number of tokens": (replace(IMAGES[1], tokens=3), "which are 4 tokens of this model.* is 3"),
    "another size inside": (replace(IMAGES[1], data=image(64, 64).data), "which are 64 tokens"),
    "no shape for the model": (replace(IMAGES[1], data=pictures.encoded(pictures.picture(2, 900))), "aspect ratio"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_image_that_cannot_be_used_fails_its_op_by_name_and_no_other(vl: Path, tmp_path: Path, case: str) -> None:
    wrong, message = WRONG[case]
    trainer = trained(vl)
    trainer.apply({"n": Create(LoraSpec(rank=8, seed=2))})
    before = state(trainer, "m", tmp_path / "before")
    bad = ForwardBackward(replace(seen_batch(datums(9)), images=(IMAGES[0], wrong, *IMAGES[2:])), "cross_entropy")
    results = trainer.apply({"m": bad, "n": op(3)})
    with pytest.raises(UserOpError, match=f"datum 2: the image at position 2 .*{message}"):
        raise results["m"]
    assert isinstance(results["n"], ForwardBackwardOutput)
    assert state(trainer, "m", tmp_path / "after") == before


def test_the_token_of_a_placeholder_in_text_is_a_token(vl: Path) -> None:
    trainer = trained(vl)
    found = datums(9)
    alone = [Seen(found[0])]
    alone[0]["tokens"][3] = PLACEHOLDER
    output = trainer.apply({"m": ForwardBackward(batch(alone), "cross_entropy", {}, True)})["m"]
    beside = trainer.apply({"m": ForwardBackward(seen_batch(found), "cross_entropy", {}, True)})["m"]
    np.testing.assert_allclose(next(iter(beside.logprobs)), output.logprobs.values, rtol=1e-5, atol=1e-5)
