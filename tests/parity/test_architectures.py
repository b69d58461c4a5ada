"""Every architecture against transformers + PEFT: packed datums, each as if it were alone; and the merged model.

The datums lie end to end in one row. The merged model runs without PEFT.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, LoraSpec, OptimStep
from tests.parity import architectures
from tests.parity.datums import batch, supervised
from tests.parity.reference import Reference, relative_error
from tests.parity.training import STEP, open_trainer, run
from workers.backends.training.architectures import ARCHITECTURES
from workers.backends.training.base import Create

LENGTHS = (23, 7, 40, 2, 31, 7)
# Their merged models are compared in fp64: the gated delta rule's rounding alone differs by 1.5e-5 in fp32.
IN_FP64 = ("qwen3.5", "qwen3.5, vision", "qwen3-next", "qwen3.5-moe", "qwen3.5-moe, vision")


def test_each_listed_architecture_has_a_case_that_is_not_called_unlisted() -> None:
    cases = {architectures.class_name(case) for case in architectures.CASES if "(unlisted)" not in case}
    assert cases == ARCHITECTURES.keys(), "change CASES in tests/parity/architectures.py"


@pytest.mark.parametrize("case", architectures.CASES)
def test_logprobs_gradients_and_the_merged_model_equal_the_reference(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base")
    backend = open_trainer(base)
    backend.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    backend.apply({"m": ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy")})
    backend.apply({"m": OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))})  # B is no longer zero
    (tmp_path / "peft").mkdir()
    backend.capture("m", optimizer=False)(tmp_path / "peft")
    backend.export("m")(tmp_path / "merged")
    reference = Reference(base, tmp_path / "peft")
    datums = supervised(9, LENGTHS)

    output = backend.apply({"m": ForwardBackward(batch(datums), "cross_entropy")})["m"]
    for found, wanted in zip(output.logprobs, reference.forward(datums), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    reference.backward(datums, "cross_entropy")
    assert relative_error(backend.gradients("m"), reference.gradients()) < 1e-5
    assert backend._engine.hidden_states.packed == ("(unlisted)" not in case)

    merged = reference.load(tmp_path / "merged")
    if case in IN_FP64:
        for model in (merged, reference.model):
            model.double().set_experts_implementation("eager")  # grouped products have no fp64
    with torch.no_grad():
        for datum in datums:
            found = merged(torch.from_numpy(datum["tokens"].astype(np.int64))[None]).logits[0]
            torch.testing.assert_close(found, reference.logits(datum), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in architectures.CASES if "(unlisted)" not in case])
def test_packed_datums_have_the_results_they_have_alone(case: str, tmp_path: Path) -> None:
    """Two tenants in one pass, with neighbours of one length, against a pass for each datum."""
    backend = open_trainer(architectures.build(case, tmp_path), micro_batch_tokens=256)
    own = {"a": supervised(1, (23, 9, 40)), "b": supervised(2, (9, 31, 9))}
    for seed, model in enumerate(own):
        backend.apply({model: Create(LoraSpec(rank=4, seed=seed))})
        run(backend, model, ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy"))
        backend.apply({model: STEP})  # B is no longer zero
    scores, gradients = {}, {}
    for model, datums in own.items():
        passes = [run(backend, model, ForwardBackward(batch([datum]), "cross_entropy")) for datum in datums]
        scores[model] = np.concatenate([one.logprobs.values for one in passes])
        gradients[model] = backend.gradients(model)
        backend.apply({model: DropGradients()})
    found = backend.apply({model: ForwardBackward(batch(datums), "cross_entropy") for model, datums in own.items()})
    for model, output in found.items():
        np.testing.assert_allclose(output.logprobs.values, scores[model], rtol=1e-5, atol=1e-5)
        assert relative_error(backend.gradients(model), gradients[model]) < 1e-5
