"""Router replay: the trainer takes the sampler's experts, and its gradients equal those of a reference with the same
experts forced upon it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep, Ragged
from app.domain.routes import none_of
from app.domain.sampling import SampleOutput, SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests import pictures
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.parity.datums import Datum, batch, supervised
from tests.parity.reference import relative_error
from tests.parity.test_images import IMAGES, LENGTHS, SeeingReference, datums
from tests.parity.training import open_trainer, reference_of, run, state
from workers.backends.sampling.backends import create
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (5, 40)]
SETTINGS = BaseModelSettings(
    name="tiny", path="", dtype="float32", router_replay=True, sampler=SamplerSettings(backend="transformers")
)
NONE = none_of(np.dtype("<u1"))
Routes = np.ndarray | None

# Formulas for the weights of chosen experts, from the router's logits; Inkling's is from the hidden states.


def softmax_of_all(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    picked = torch.softmax(logits, -1).gather(1, chosen)
    return picked / picked.sum(-1, keepdim=True) if router.norm_topk_prob else picked


def softmax_of_chosen(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits.gather(1, chosen), -1)


def sigmoid(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    picked = torch.sigmoid(logits).gather(1, chosen)
    return picked / picked.sum(-1, keepdim=True) * router.routed_scaling_factor


def inkling(router: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """The shared experts' weights come behind those of the chosen ones."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    routed, shared = logits.split([router.num_experts, router.n_shared_experts], -1)
    picked = torch.sigmoid(torch.cat([routed.gather(1, chosen), shared], -1))
    return picked / picked.sum(-1, keepdim=True) * router.route_scale * router.global_scale


FORMULAS = {
    "qwen3-moe": softmax_of_all,
    "gpt-oss": softmax_of_chosen,
    "deepseek-v3": sigmoid,
    "deepseek-v3.2": sigmoid,
    "nemotron-h": sigmoid,
    "inkling": inkling,
}
CASES = (
    *FORMULAS,
    "qwen3-next",
    "qwen3.5-moe, vision",
    "qwen3-vl-moe",
    "glm4-moe",
    "glm4-moe-lite",
    "kimi-linear",
    "minimax-m2",
    "mixtral",
    "olmoe",
)


def opened(case: str, folder: Path) -> tuple[Path, Trainer]:
    base = architectures.build(case, folder / "base")
    byte_tokenizer().save_pretrained(base)
    return base, open_trainer(base)


def train(trainer: Trainer, model: str, seed: int) -> None:
    """A model with an adapter of its own, which differs much from the base."""
    trainer.apply({model: Create(LoraSpec(rank=4, seed=seed))})
    trainer.apply({model: ForwardBackward(batch(supervised(seed, (23, 7))), "cross_entropy")})
    trainer.apply({model: OptimStep(AdamParams(learning_rate=3e-2, eps=1e-8))})


def asked(prompt: np.ndarray) -> SampleRequest:
    return SampleRequest(prompt, 2, 6, seed=1, ignore_eos=True)


def sampled(base: Path, adapter: Path, requests: Sequence[SampleRequest]) -> list[SampleOutput]:
    sampler = create(SETTINGS.model_copy(update={"path": str(base)}))
    sampler.open()
    sampler.load("m", adapter)
    with ThreadPoolExecutor() as threads:
        outputs = list(threads.map(partial(sampler.sample, "m"), requests))
    sampler.close()
    return outputs


def sequences(outputs: Sequence[SampleOutput]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens of each sequence but the last one, and their routes."""
    return [
        (np.concatenate([prompt, sample.tokens[:-1]]), np.concatenate([output.prompt_routes, sample.routes]))
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for sample in output.sequences
    ]


def op_of(datums: list[Datum], routes: Sequence[Routes], **options: Any) -> ForwardBackward:
    like = next(one for one in routes if one is not None)
    given = [
        np.full((len(datum["tokens"]), *like.shape[1:]), NONE) if one is None else one
        for datum, one in zip(datums, routes, strict=True)
    ]
    return ForwardBackward(replace(batch(datums), routes=Ragged.of(given, np.uint8)), "cross_entropy", **options)


def chosen_by(trainer: Trainer, run_it: Callable[[], object]) -> np.ndarray:
    """The experts [tokens, layers, top_k] that the trainer's model gave its tokens to."""
    found: list[Tensor] = []
    modules = [m for path, m in trainer._engine.base.model.named_modules() if path.endswith(".experts")]
    hooks = [m.register_forward_pre_hook(lambda _, given: found.append(given[1])) for m in modules]
    run_it()
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).cpu().numpy()


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_routes_as_the_sampler_did(case: str, tmp_path: Path) -> None:
    base, trainer = opened(case, tmp_path)
    train(trainer, "sampled", 1)
    train(trainer, "trained", 2)
    (tmp_path / "adapter").mkdir()
    trainer.capture("sampled", optimizer=False)(tmp_path / "adapter")
    differing = 0
    for tokens, routes in sequences(sampled(base, tmp_path / "adapter", [*map(asked, PROMPTS)])):
        datum = {**supervised(0, [len(tokens)])[0], "tokens": tokens}
        plain = ForwardBackward(batch([datum]), "cross_entropy", forward_only=True)
        own = chosen_by(trainer, partial(run, trainer, "trained", plain))
        differing += (np.sort(own) != np.sort(routes)).any(-1).sum()
        replayed = op_of([datum], [routes], forward_only=True)
        found = chosen_by(trainer, partial(run, trainer, "trained", replayed))
        assert np.array_equal(found, routes)
    assert differing, "the two adapters route alike, so this shows nothing"


@pytest.mark.parametrize(("case", "checkpointing"), [("qwen3-moe", True), *((case, False) for case in CASES)])
def test_the_metrics_of_each_tenant_tell_how_its_tokens_are_spread_over_the_experts(
    case: str, checkpointing: bool, tmp_path: Path
) -> None:
    """In micro-batches, beside another tenant, with given experts for some tokens, and whether layers run once or
    twice."""
    base, _ = opened(case, tmp_path)
    cut = open_trainer(base, checkpointing=checkpointing, micro_batch_tokens=32)
    whole = open_trainer(base, micro_batch_tokens=128)
    for trainer in (cut, whole):
        train(trainer, "a", 1)
        train(trainer, "b", 2)
    lengths, generator = (23, 7, 40, 9), np.random.default_rng(3)
    layers = cut._engine.hidden_states.routed[0]
    given = [generator.random((n, layers, 4)).argsort(-1)[..., :2].astype(np.uint8) for n in lengths]
    ops = {
        "a": op_of(supervised(4, lengths), [None, *given[1:]]),
        "b": ForwardBackward(batch(supervised(5, lengths)), "cross_entropy"),
    }
    outputs, balance = cut.apply(ops), sum(lengths) * 2 / 4
    for model, op in ops.items():
        chosen = chosen_by(whole, partial(run, whole, model, op))
        counts = np.stack([np.bincount(chosen[:, layer].ravel(), minlength=4) for layer in range(layers)])
        wanted = {
            "e_frac_with_tokens:mean": (counts > 0).mean(),
            "e_frac_oversubscribed:mean": (counts > balance).mean(),
            "e_max_violation:mean": (counts.max(1) / balance - 1).mean(),
            "e_max_violation:max": counts.max() / balance - 1,
            "e_min_violation:mean": (counts.min(1) / balance - 1).mean(),
        }
        metrics = outputs[model].metrics
        assert {key: metrics[key] for key in metrics if key.startswith("e_")} == pytest.approx(wanted)


def force(model: Any, formula: Callable[..., Tensor], given: list[np.ndarray]) -> None:
    """Makes the reference's routers take given[0], read at each pass, with the weights of `formula`."""
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for layer, router in enumerate(routers):

        def hook(router: Any, inputs: Any, outputs: Any, layer: int = layer) -> Any:
            logits, weights, natural, *of_shared = outputs
            wanted = torch.from_numpy(given[0][:, layer].astype(np.int64))
            chosen = torch.where(wanted == NONE, natural, wanted)
            found = formula(router, inputs[0] if of_shared else logits, chosen).to(weights.dtype)
            top = chosen.shape[1]
            return logits, found[:, :top], chosen, *(found[:, top:] for _ in of_shared)

        router.register_forward_hook(hook)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", FORMULAS)
def test_gradients_of_two_tenants_equal_a_reference_with_forced_experts(
    case: str, checkpointing: bool, tmp_path: Path
) -> None:
    base, trainer = opened(case, tmp_path)
    if checkpointing:
        trainer = open_trainer(base, checkpointing=True)
    train(trainer, "a", 1)
    train(trainer, "b", 2)
    lengths, generator = (23, 7, 40, 9), np.random.default_rng(3)
    layers = len([m for path, m in trainer._engine.base.model.named_modules() if path.endswith(".experts")])
    datums = {model: supervised(seed, lengths) for model, seed in (("a", 4), ("b", 5))}
    routes: dict[str, list[Routes]] = {
        model: [generator.random((n, layers, 4)).argsort(-1)[..., :2].astype(np.uint8) for n in lengths]
        for model in datums
    }
    routes["a"][1] = None
    for one in (routes["a"][2], routes["b"][3]):
        assert one is not None
        one[-2:] = NONE

    references = {model: reference_of(trainer, model, base, tmp_path / model) for model in datums}
    ops = {model: op_of(datums[model], routes[model]) for model in datums}
    outputs = trainer.apply(ops)
    for model, reference in references.items():
        given = [np.empty(0)]
        force(reference.model, FORMULAS[case], given)
        for datum, one, found in zip(datums[model], routes[model], outputs[model].logprobs, strict=True):
            given[0] = np.full((len(datum["tokens"]), layers, 2), NONE) if one is None else one
            np.testing.assert_allclose(found, reference.forward([datum])[0], rtol=1e-5, atol=1e-5)
            reference.backward([datum], "cross_entropy")
        assert relative_error(trainer.gradients(model), reference.gradients()) < 1e-5


READERS = ("qwen3-vl-moe", "qwen3.5-moe")


def readers(family: str, folder: Path) -> tuple[Path, Trainer]:
    base = pictures.tiny_reader(family, folder / "base")
    byte_tokenizer().save_pretrained(base)
    return base, open_trainer(base)


@pytest.mark.parametrize("family", READERS)
def test_text_and_images_are_routed_as_the_sampler_did(family: str, tmp_path: Path) -> None:
    base, trainer = readers(family, tmp_path)
    train(trainer, "sampled", 1)
    train(trainer, "trained", 2)
    (tmp_path / "adapter").mkdir()
    trainer.capture("sampled", optimizer=False)(tmp_path / "adapter")
    seen = pictures.image(24, 16, 1, position=5)
    prompt = np.random.default_rng(1).integers(0, 256, 20).astype(np.int32)
    prompt[5 : 5 + seen.tokens] = 0
    requests = [replace(request, images=images) for request in [asked(prompt)] for images in ((seen,), ())]
    outputs = sampled(base, tmp_path / "adapter", requests)
    for output, images in zip(outputs, ((seen,), ()), strict=True):
        for sample in output.sequences:
            tokens = np.concatenate([prompt, sample.tokens[:-1]])
            routes = np.concatenate([output.prompt_routes, sample.routes])
            datum = {**supervised(0, [len(tokens)])[0], "tokens": tokens}
            op = op_of([datum], [routes], forward_only=True)
            op = replace(op, batch=replace(op.batch, images=images))
            plain = replace(op, batch=replace(op.batch, routes=None))
            own = chosen_by(trainer, partial(run, trainer, "trained", plain))
            assert (np.sort(own) != np.sort(routes)).any(), "the two adapters route alike, so this shows nothing"
            assert np.array_equal(chosen_by(trainer, partial(run, trainer, "trained", op)), routes)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", READERS)
def test_gradients_of_text_and_images_equal_a_reference_with_forced_experts(
    family: str, checkpointing: bool, tmp_path: Path
) -> None:
    base, trainer = readers(family, tmp_path)
    if checkpointing:
        trainer = open_trainer(base, checkpointing=True)
    train(trainer, "m", 1)
    (tmp_path / "adapter").mkdir()
    trainer.capture("m", optimizer=False)(tmp_path / "adapter")
    reference = SeeingReference(base, tmp_path / "adapter")
    generator, given = np.random.default_rng(3), [np.empty(0)]
    routes = [generator.random((n, 2, 4)).argsort(-1)[..., :2].astype(np.uint8) for n in LENGTHS]
    op = op_of(list(datums(9)), routes)
    output = trainer.apply({"m": replace(op, batch=replace(op.batch, images=IMAGES))})["m"]
    force(reference.model, softmax_of_chosen, given)  # as both families take the weights
    for datum, one, found in zip(datums(9), routes, output.logprobs, strict=True):
        given[0] = one
        np.testing.assert_allclose(found, reference.forward([datum])[0], rtol=1e-5, atol=1e-5)
        reference.backward([datum], "cross_entropy")
    assert relative_error(trainer.gradients("m"), reference.gradients()) < 1e-5


def test_an_op_without_routes_beside_one_with_routes_has_the_bits_that_it_has_alone(tmp_path: Path) -> None:
    _, trainer = opened("qwen3-moe", tmp_path)
    train(trainer, "a", 1)
    datums = supervised(4, (23, 7))
    plain = ForwardBackward(batch(datums), "cross_entropy")
    free = [np.full((n, 2, 2), NONE, np.uint8) for n in (23, 7)]
    alone = run(trainer, "a", plain)
    before = state(trainer, "a", tmp_path / "alone")
    train(trainer, "a", 1)
    replayed = run(trainer, "a", op_of(datums, free))
    assert np.array_equal(alone.logprobs.values, replayed.logprobs.values)
    assert state(trainer, "a", tmp_path / "replayed") == before
    for name in "ab":
        train(trainer, name, 1)
    chosen = [np.full_like(one, 1) - np.arange(2, dtype=np.uint8) for one in free]
    beside = trainer.apply({"a": plain, "b": op_of(datums, chosen)})["a"]
    np.testing.assert_allclose(alone.logprobs.values, beside.logprobs.values, rtol=1e-5, atol=1e-5)


def test_without_the_setting_a_sampler_keeps_no_routes(tmp_path: Path) -> None:
    base, _ = opened("qwen3-moe", tmp_path)
    sampler = create(SETTINGS.model_copy(update={"path": str(base), "router_replay": False}))
    sampler.open()
    output = sampler.sample(None, SampleRequest(PROMPTS[0], 1, 3, seed=1))
    sampler.close()
    assert (output.prompt_routes, output.sequences[0].routes) == (None, None)
