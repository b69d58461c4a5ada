"""A base model in 4 or 8 bits against transformers and PEFT on its dequantised weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.parity.datums import batch, supervised
from tests.parity.reference import Reference, relative_error
from tests.parity.training import open_trainer, state
from workers.backends.sampling.backends import create
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

LENGTHS = (23, 7, 40)
CASES = [
    ("nf4", "qwen3"),
    ("int8", "qwen3"),
    ("fp8", "qwen3"),
    ("nf4", "qwen3-moe"),
    ("nf4", "gpt-oss"),
    ("nf4", "deepseek-v3"),
    ("nf4", "llama4"),
    ("int8", "nemotron-h"),
    ("fp8", "inkling"),
    ("int8", "qwen3.5, vision"),
    ("fp8", "qwen3-next"),
]
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 instructions, where quantised weights are dequantised to fp32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_logprobs_gradients_and_the_merged_model_equal_those_on_the_dequantised_base(
    kind: str, case: str, tmp_path: Path
) -> None:
    base = architectures.build(case, tmp_path / "base")
    byte_tokenizer().save_pretrained(base)
    trainer = open_trainer(base, kind)
    trainer.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    trainer.export("m")(tmp_path / "dequantised")  # a new adapter changes nothing
    train(trainer, 0)
    (tmp_path / "peft").mkdir()
    trainer.capture("m", optimizer=False)(tmp_path / "peft")
    trainer.export("m")(tmp_path / "merged")
    reference = Reference(tmp_path / "dequantised", tmp_path / "peft")
    datums = supervised(9, LENGTHS)

    output = trainer.apply({"m": ForwardBackward(batch(datums), "cross_entropy")})["m"]
    for found, wanted in zip(output.logprobs, reference.forward(datums), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    reference.backward(datums, "cross_entropy")
    assert relative_error(trainer.gradients("m"), reference.gradients()) < 1e-5

    merged = reference.load(tmp_path / "merged")
    with torch.no_grad():
        for datum in datums:
            logits = merged(torch.from_numpy(datum["tokens"].astype(np.int64))[None]).logits[0]
            torch.testing.assert_close(logits, reference.logits(datum), rtol=1e-4, atol=1e-4)
    assert_sampled_alike(base, kind, tmp_path / "peft", reference)


def assert_sampled_alike(base: Path, kind: str, adapter: Path, reference: Reference) -> None:
    """The transformers sampler's logprobs are those on the dequantised base, too."""
    sampler = create(
        BaseModelSettings(name="tiny", path=str(base), dtype=kind, sampler=SamplerSettings(backend="transformers"))
    )
    sampler.open()
    sampler.load("m", adapter)
    prompt = np.arange(1, 12, dtype=np.int32)
    (sample,) = sampler.sample("m", SampleRequest(prompt, 1, 12, seed=1, ignore_eos=True)).sequences
    sampler.close()
    tokens = np.concatenate([prompt, sample.tokens])
    wanted = reference.logprobs({"tokens": tokens[:-1], "target_tokens": tokens[1:].astype(np.int64)})
    np.testing.assert_allclose(sample.logprobs, wanted.detach()[len(prompt) - 1 :], atol=1e-4)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_a_new_process_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    """In the dtype that this CPU is fast at: quantising again gives the same base."""
    base = architectures.build("qwen3-moe", tmp_path / "base")
    undisturbed = open_trainer(base, kind)
    undisturbed.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    train(undisturbed, 0)
    (tmp_path / "snapshot").mkdir()
    undisturbed.capture("m", optimizer=True)(tmp_path / "snapshot")
    train(undisturbed, 1)

    other = open_trainer(base, kind)
    other.apply({"m": Create(LoraSpec(rank=4, seed=1), source=tmp_path / "snapshot", optimizer=True)})
    train(other, 1)
    assert state(other, "m", tmp_path / "other") == state(undisturbed, "m", tmp_path / "undisturbed")


@pytest.mark.parametrize("stage", [0, 2])
def test_deepspeed_trains_beside_the_same_numbers(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bf16 mode leaves codes and scales alone."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    base = architectures.build("qwen3", tmp_path / "base")
    settings = BaseModelSettings(
        name="tiny", path=str(base), dtype="nf4", trainer={"zero_stage": stage, "micro_batch_tokens": 64}
    )
    trainers = [backends.create(settings), open_trainer(base, "nf4")]
    trainers[0].open()
    for trainer in trainers:
        trainer.apply({"m": Create(LoraSpec(rank=4, seed=1))})
        train(trainer, 0)
    states = [state(trainer, "m", tmp_path / str(n)) for n, trainer in enumerate(trainers)]
    assert states[0] == states[1]
    assert all(trainer.describe()["base_elements_held"] > 100_000 for trainer in trainers)


def train(trainer: Trainer, seed: int) -> None:
    trainer.apply({"m": ForwardBackward(batch(supervised(seed, LENGTHS)), "cross_entropy")})
    trainer.apply({"m": STEP})
