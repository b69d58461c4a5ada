"""Promises of every SamplerBackend for fully fine-tuned models, on both backends, against plain transformers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.sampling import SampledSequence
from app.errors import OpError, ServerOpError, UserOpError
from app.settings import BaseModelSettings
from tests.conformance.samplers import BACKENDS, CONTEXT, PROMPTS, Reference, ask, one, tokens_of
from tests.models import tiny_qwen3
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import Aborted, RequestHandle, SamplerBackend
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.process.fair_queue import FairQueue
from workers.process.gpu_turns import GpuTurns, SamplerInTurns
from workers.sample.adapters import AdapterScheduler

MODELS = ("one", "two")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Models of one architecture with different random weights; the base model has none of these."""
    folder = tmp_path_factory.mktemp("full")
    return {name: Reference(tiny_qwen3(folder / name, seed), {}) for seed, name in enumerate(MODELS, 1)}


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def full_sampler(
    request: pytest.FixtureRequest, models: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SamplerBackend]:
    base = tiny_qwen3(tmp_path_factory.mktemp("base"))
    backend = create(
        BaseModelSettings(
            name="tiny", path=str(base), dtype="float32", max_context=CONTEXT, sampler=BACKENDS[request.param]
        ),
        full=True,
    )
    backend.open()
    yield backend
    backend.close()
    assert not backend.healthy()


Tensors = dict[str, torch.Tensor]


def copied(source: Path, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Returns a copy of a model with changed tensors."""
    folder.mkdir()
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


Sampled = Callable[..., SampledSequence]


@pytest.fixture
def sampled(full_sampler: SamplerBackend, models: dict[str, Reference]) -> Sampled:
    def sample(name: str, prompt: np.ndarray, **fields: object) -> SampledSequence:
        full_sampler.load(name, models[name].folder)
        return one(full_sampler, name, prompt, **fields)

    return sample


def test_samples_are_those_of_the_model_that_is_there(sampled: Sampled, models: dict[str, Reference]) -> None:
    """Alternates between models, with prompts that the previous model has left in the engine's cache."""
    for name in (*MODELS, *MODELS):
        for prompt in PROMPTS:
            sequence = sampled(name, prompt, temperature=0.0)
            assert sequence.tokens.tolist() == models[name].greedy(None, prompt, 12)
            whole_text = np.concatenate([prompt, sequence.tokens])
            np.testing.assert_allclose(sequence.logprobs, models[name].logprobs(None, whole_text)[-12:], atol=1e-3)


def test_a_model_that_comes_back_gives_the_same_bits(sampled: Sampled) -> None:
    first, _, again = (sampled(name, PROMPTS[3], seed=9) for name in ("one", "two", "one"))
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.logprobs.tobytes() == again.logprobs.tobytes()


def test_prompt_logprobs_are_those_of_the_model_that_is_there(
    full_sampler: SamplerBackend, models: dict[str, Reference]
) -> None:
    for name in MODELS:
        full_sampler.load(name, models[name].folder)
        found = full_sampler.sample(name, ask(PROMPTS[3], prompt_logprobs=True, max_tokens=1)).prompt_logprobs
        np.testing.assert_allclose(found[1:], models[name].logprobs(None, PROMPTS[3]), atol=1e-3)


def test_requests_that_take_turns_have_each_their_own_model(full_sampler: SamplerBackend, models: dict[str, Reference]):
    scheduler = AdapterScheduler(1, FairQueue())

    def sample(name: str, seed: int) -> list[list[int]]:
        with scheduler.turn(name, "me", RequestHandle()):
            full_sampler.load(name, models[name].folder)
            return tokens_of(full_sampler.sample(name, ask(PROMPTS[1], num_samples=3, seed=seed)))

    alone = {name: [sample(name, seed) for seed in range(6)] for name in MODELS}
    assert alone["one"] != alone["two"]
    with ThreadPoolExecutor(12) as pool:
        running = [(name, seed, pool.submit(sample, name, seed)) for seed in range(6) for name in MODELS]
        for name, seed, future in running:
            assert future.result() == alone[name][seed]


@pytest.mark.parametrize("full_sampler", ["vllm"], indirect=True)
def test_weights_stay_while_the_engine_sleeps_and_are_replaced_when_it_wakes(
    full_sampler: SamplerBackend, models: dict[str, Reference], tmp_path: Path
) -> None:
    sampler = SamplerInTurns(cast(VllmSampler, full_sampler), tmp_path / "gpus", 240.0, turn_s=0.0)
    trainer = GpuTurns(tmp_path / "gpus", lambda: None, lambda: None, 240.0, turn_s=0.0)
    for present, following in (MODELS, MODELS[::-1]):
        sampler.load(present, models[present].folder)
        expected = models[present].greedy(None, PROMPTS[3], 12)
        for _ in range(2):
            assert one(sampler, present, PROMPTS[3], temperature=0.0).tokens.tolist() == expected
            with trainer.use():
                assert not sampler.turns.held
        sampler.load(following, models[following].folder)
        expected = models[following].greedy(None, PROMPTS[3], 12)
        assert one(sampler, following, PROMPTS[3], temperature=0.0).tokens.tolist() == expected
    for turns in (trainer, sampler.turns):
        turns.close()


def test_another_model_waits_for_what_runs(full_sampler: SamplerBackend, models: dict[str, Reference]) -> None:
    full_sampler.load("one", models["one"].folder)
    request = ask(PROMPTS[0], num_samples=4, max_tokens=100)
    alone = tokens_of(full_sampler.sample("one", request))
    begun = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(full_sampler.sample, "one", request, RequestHandle(lambda *_: begun.set()))
        assert begun.wait(240)
        swap = pool.submit(full_sampler.load, "two", models["two"].folder)
        while not swap.done():
            assert full_sampler.healthy(), "to wait is no fault"
            time.sleep(0.001)
        swap.result()
        assert tokens_of(running.result()) == alone


def test_an_aborted_request_delays_no_other(
    full_sampler: SamplerBackend, models: dict[str, Reference], sampled: Sampled
):
    for name, other in (MODELS, MODELS[::-1]):
        full_sampler.load(name, models[name].folder)
        begun = threading.Event()
        handle = RequestHandle(lambda *_, begun=begun: begun.set())
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(full_sampler.sample, name, ask(PROMPTS[3], num_samples=512, max_tokens=160), handle)
            assert begun.wait(240)
            handle.abort()
            with pytest.raises(Aborted):
                running.result()
        assert sampled(other, PROMPTS[3], temperature=0.0).tokens.tolist() == models[other].greedy(None, PROMPTS[3], 12)


def test_one_that_is_not_there_is_not_sampled(full_sampler: SamplerBackend, models: dict[str, Reference]) -> None:
    full_sampler.load("one", models["one"].folder)
    full_sampler.load("two", models["two"].folder)
    with pytest.raises(ServerOpError, match="'one' is not loaded"):
        one(full_sampler, "one", PROMPTS[0])
    full_sampler.evict("one")
    assert full_sampler.describe()["adapters"] == ["two"]
    full_sampler.evict("two")
    assert full_sampler.describe()["adapters"] == []
    with pytest.raises(ServerOpError, match="'two' is not loaded"):
        one(full_sampler, "two", PROMPTS[0])


def test_a_folder_of_another_model_is_refused_and_what_is_there_stays(
    full_sampler: SamplerBackend, sampled: Sampled, models: dict[str, Reference], tmp_path: Path
) -> None:
    before = sampled("one", PROMPTS[1], temperature=0.0).tokens.tolist()
    (tmp_path / "empty").mkdir()
    narrow, deep = (AutoConfig.from_pretrained(models["one"].folder) for _ in range(2))
    narrow.intermediate_size //= 2
    deep.num_hidden_layers, deep.layer_types = 3, [*deep.layer_types, deep.layer_types[0]]
    AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path / "narrow")
    AutoModelForCausalLM.from_config(deep).save_pretrained(tmp_path / "deep")
    for folder in ("empty", "narrow", "deep"):
        with pytest.raises(UserOpError, match=folder):
            full_sampler.load(folder, tmp_path / folder)
    assert one(full_sampler, "one", PROMPTS[1], temperature=0.0).tokens.tolist() == before


def test_tensors_that_are_not_of_the_model_are_passed_over(
    full_sampler: SamplerBackend, models: dict[str, Reference], tmp_path: Path
) -> None:
    """TRL writes a value head beside a model, and older versions of transformers wrote rotary frequencies."""
    further = {
        "v_head.summary.weight": torch.ones(1, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.mlp.experts.0.v_head.weight": torch.ones(1, 64),
        "lm_head.weight.further": torch.ones(1),
        "mtp.fc.weight": torch.ones(64, 128),
    }
    folder = copied(models["one"].folder, tmp_path / "further", lambda tensors: {**tensors, **further})
    full_sampler.load("two", models["two"].folder)
    full_sampler.load("further", folder)
    found = one(full_sampler, "further", PROMPTS[1], temperature=0.0)
    assert found.tokens.tolist() == models["one"].greedy(None, PROMPTS[1], 12)


def test_weights_of_which_one_is_missing_are_refused_and_what_is_there_stays(
    full_sampler: SamplerBackend, sampled: Sampled, models: dict[str, Reference], tmp_path: Path
) -> None:
    before = sampled("two", PROMPTS[1], temperature=0.0).tokens.tolist()
    name = "model.layers.1.mlp.up_proj.weight"
    less = copied(
        models["one"].folder, tmp_path / "less", lambda tensors: {n: tensors[n] for n in tensors if n != name}
    )
    with pytest.raises(UserOpError, match=rf"less.* {name}"):
        full_sampler.load("less", less)
    assert one(full_sampler, "two", PROMPTS[1], temperature=0.0).tokens.tolist() == before


def test_weights_that_are_not_finite_harm_no_other_model(
    full_sampler: SamplerBackend, sampled: Sampled, models: dict[str, Reference], tmp_path: Path
) -> None:
    nan = copied(
        models["one"].folder,
        tmp_path / "nan",
        lambda tensors: {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()},
    )
    full_sampler.load("broken", nan)
    with pytest.raises(OpError, match="not finite"):
        one(full_sampler, "broken", PROMPTS[1])
    assert sampled("two", PROMPTS[1], temperature=0.0).tokens.tolist() == models["two"].greedy(None, PROMPTS[1], 12)
    assert full_sampler.healthy()


def test_whether_it_works_is_found_without_naming_a_model(full_sampler: SamplerBackend) -> None:
    assert len(one(full_sampler, None, PROMPTS[0], max_tokens=1).tokens) == 1
