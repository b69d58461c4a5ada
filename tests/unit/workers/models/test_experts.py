"""Adapters on stacked experts equal transformers' own loop over experts with each tenant's merged weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from app.domain.ops import LoraSpec
from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.models import base_model, experts, lora, peft_files
from workers.models.adapter import Adapter
from workers.models.products import grouped

_SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
_CONFIGS = {
    "Qwen3Moe": lambda: Qwen3MoeConfig(**_SHAPE, num_experts=4, moe_intermediate_size=24),
    "GptOss": lambda: GptOssConfig(**_SHAPE, num_local_experts=4),
}
_PATH = "model.layers.0.mlp.experts"
_TENSORS = {"gate_up_proj": f"{_PATH}.base_layer", "down_proj": _PATH}


@pytest.fixture(params=_CONFIGS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(_CONFIGS[request.param](), attn_implementation="eager")
    for parameter in model.get_submodule(_PATH).parameters():
        nn.init.normal_(parameter, std=0.3)
    lora.wrap(model.eval().requires_grad_(False))
    return model


def trained(model: nn.Module, rank: int, seed: int) -> Adapter:
    adapter = lora.new_adapter(model, LoraSpec(rank=rank, seed=seed, alpha=3))
    for pair in adapter.pairs.values():
        nn.init.normal_(pair.b, generator=torch.Generator().manual_seed(seed))
    return adapter


def routed(tokens: int = 11, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, two experts of each token, and their weights; expert 2 has no token."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(tokens, 3, generator=generator).argsort(1)[:, :2]
    chosen[chosen == 2] = 3
    return (
        torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_(),
        chosen,
        torch.rand(tokens, 2, generator=generator).to(dtype),
    )


def by_loop(model: Any, adapter: Adapter | None, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    module = model.get_submodule(_PATH)
    merged = dict(module.named_parameters())
    for name, path in _TENSORS.items() if adapter is not None else ():
        pair, count = adapter.pairs[path], module.num_experts
        added = [
            adapter.scaling * pair.b[:, e::count] @ pair.a[e * adapter.spec.rank : (e + 1) * adapter.spec.rank]
            for e in range(count)
        ]
        stacked = torch.stack([one.T if module.is_transposed else one for one in added])
        merged[name] = (merged[name] + stacked).to(hidden.dtype)
    model.set_experts_implementation("eager")
    try:
        return functional_call(module, merged, (hidden, chosen, weights))
    finally:
        model.set_experts_implementation(experts.NAME)


def tenants(model: nn.Module) -> list[tuple[Adapter | None, int]]:
    return [(trained(model, 3, 1), 4), (None, 2), (trained(model, 10, 2), 5)]


def expected(model: nn.Module, segments: list[tuple[Adapter | None, int]], inputs: tuple[Tensor, ...]) -> Tensor:
    shares = zip(*(tensor.split([count for _, count in segments]) for tensor in inputs), strict=True)
    return torch.cat([by_loop(model, a, *share) for (a, _), share in zip(segments, shares, strict=True)])


def gradients(output: Tensor, hidden: Tensor, segments: list[tuple[Adapter | None, int]]) -> list[Tensor]:
    pairs = [a.pairs[path] for a, _ in segments if a is not None for path in _TENSORS.values()]
    return list(torch.autograd.grad(output.square().sum(), [hidden, *(p for pair in pairs for p in (pair.a, pair.b))]))


@pytest.mark.parametrize("recomputed", [False, True])
def test_several_tenants_in_one_pass_get_the_outputs_and_gradients_of_a_loop(
    model: nn.Module, recomputed: bool
) -> None:
    segments, inputs, module = tenants(model), routed(), model.get_submodule(_PATH)
    with lora.use(segments):
        output = checkpoint(module, *inputs, use_reentrant=False) if recomputed else module(*inputs)
        found = gradients(output, inputs[0], segments)
    wanted = expected(model, segments, inputs)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, gradients(wanted, inputs[0], segments), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_inference_mode_gives_the_same_outputs(model: nn.Module) -> None:
    segments, inputs = tenants(model), routed()
    with lora.use(segments), torch.inference_mode():
        output = model.get_submodule(_PATH)(*inputs)
    torch.testing.assert_close(output, expected(model, segments, inputs), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_a_loop_is(model: nn.Module) -> None:
    """With 200 tokens the experts' rows are padded."""
    segments = [(adapter, 20 * count) for adapter, count in tenants(model)]
    exact = both(expected(model, segments, inputs := routed(220)), inputs, segments)
    model.bfloat16()
    inputs = routed(220, torch.bfloat16)
    with lora.use(segments):
        found = both(model.get_submodule(_PATH)(*inputs), inputs, segments)
    looped = both(expected(model, segments, inputs), inputs, segments)
    for one, other, wanted in zip(found, looped, exact, strict=True):
        error, error_of_loop = ((tensor.float() - wanted).norm() for tensor in (one, other))
        assert error <= 2 * error_of_loop, "an adapter's product is rounded twice more than a merged weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "width"), [(3, 24), (32, 512)])
@pytest.mark.parametrize("transposed", [False, True])
def test_merged_experts_have_the_bits_of_all_at_once_and_are_computed_one_by_one(
    dtype: torch.dtype, rank: int, width: int, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=generator)
        for shape in ((6, *((40, width) if transposed else (width, 40))), (6 * rank, 40), (width, 6 * rank))
    )
    weight = weight.to(dtype)
    added = torch.bmm(b.view(width, rank, 6).permute(2, 0, 1), a.view(6, rank, 40))
    wanted = (weight.float() + 0.7 * (added.mT if transposed else added)).to(dtype)
    with Largest() as largest:
        found = experts.merged(SimpleNamespace(is_transposed=transposed), weight, a, b, 0.7)
    assert found.dtype == dtype and torch.equal(found, wanted)
    assert largest.elements == width * 40, "one expert at a time"


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation computes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not func.is_view and func is not torch.ops.aten.empty_like.default:
            self.elements = max(self.elements, found.numel())
        return found


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of groups of all grouped products. Their backward passes have the same."""
    found: list[int] = []
    real = experts._grouped_mm

    def noted(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        found.append(len(ends))
        return real(x, weights, ends)

    monkeypatch.setattr(experts, "_grouped_mm", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_in_several_products_have_the_bits_of_one_product(
    model: nn.Module, dtype: torch.dtype, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [(adapter, 20 * count) for adapter, count in tenants(model)]
    model.to(dtype)

    def passed() -> list[Tensor]:
        inputs = routed(220, dtype)
        with lora.use(segments):
            return both(model.get_submodule(_PATH)(*inputs), inputs, segments)

    wanted = passed()
    assert set(groups) == {12}, "four experts and three tenants"
    groups.clear()
    monkeypatch.setattr(grouped, "MOST_GROUPS", 7)
    assert all(torch.equal(one, other) for one, other in zip(passed(), wanted, strict=True))
    assert groups == [7, 7, 4] * 4


def test_no_product_has_more_groups_than_the_kernels_of_a_gpu_take(groups: list[int]) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**_SHAPE, num_experts=128, moe_intermediate_size=24)
    model = AutoModelForCausalLM.from_config(config)
    lora.wrap(model.eval().requires_grad_(False))
    segments = [(lora.new_adapter(model, LoraSpec(rank=1, seed=seed)), 2) for seed in range(9)]
    with lora.use(segments):
        model(torch.randint(40, (1, 18))).logits.sum().backward()
    assert sum(groups) > 9 * 128
    assert max(groups) < 1024


def test_a_row_that_is_not_finite_leaves_other_groups_alone(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are multiplied by it, in the products of other groups."""
    monkeypatch.setattr(grouped, "MOST_GROUPS", 4)
    segments, (hidden, chosen, weights) = tenants(model), routed()
    bad = torch.cat([hidden[:4] * torch.nan, hidden[4:]]).detach().requires_grad_()
    with lora.use(segments):
        found, wanted = (
            both(model.get_submodule(_PATH)(*inputs), inputs, segments)
            for inputs in ((bad, chosen, weights), (hidden, chosen, weights))
        )
    assert found[0][:4].isnan().all()
    rows = [(one[4:], other[4:]) for one, other in zip(found[:2], wanted[:2], strict=True)]
    assert all(torch.equal(one, other) for one, other in [*rows, *zip(found[-4:], wanted[-4:], strict=True)])


def test_a_row_that_is_not_finite_fills_up_no_other_group(model: nn.Module) -> None:
    """On a CPU in bfloat16, spare rows round a group's size."""
    segments = [(adapter, 20 * count) for adapter, count in tenants(model)]
    hidden, chosen, weights = routed(220, torch.bfloat16)
    bad = torch.cat([hidden[:80] * torch.nan, hidden[80:]]).detach().requires_grad_()
    module = model.get_submodule(_PATH).to(torch.bfloat16)
    with lora.use(segments):
        found, wanted = (
            both(module(*inputs), inputs, segments) for inputs in ((bad, chosen, weights), (hidden, chosen, weights))
        )
    rows = [(one[80:], other[80:]) for one, other in zip(found[:2], wanted[:2], strict=True)]
    assert all(torch.equal(one, other) for one, other in [*rows, *zip(found[-4:], wanted[-4:], strict=True)])


def both(output: Tensor, inputs: tuple[Tensor, ...], segments: list[tuple[Adapter | None, int]]) -> list[Tensor]:
    return [output, *gradients(output, inputs[0], segments)]


def test_bfloat16_passes_have_few_different_numbers_of_rows() -> None:
    sizes = torch.arange(5000)
    found = experts._rounded(sizes)
    assert len(found.unique()) <= 8 * 13
    assert bool(((found >= sizes) & (found <= sizes * 9 // 8)).all())


def test_saved_pairs_are_read_back_to_the_bit(model: nn.Module, tmp_path: Path) -> None:
    adapter = trained(model, 3, 1)
    peft_files.write(adapter, tmp_path, "base", model)
    found = peft_files.read(tmp_path)
    lora.check_fits(found, model)
    assert found.spec.train_mlp
    assert found.tensors.keys() == adapter.tensors.keys()
    for name, parameter in adapter.tensors.items():
        assert torch.equal(found.tensors[name], parameter)


@pytest.mark.parametrize("case", ["llama4", "nemotron-h, latent", "inkling, vision"])
def test_pairs_of_every_layout_are_read_back(case: str, tmp_path: Path) -> None:
    model = base_model.load(
        BaseModelSettings(name="q", path=str(architectures.build(case, tmp_path)), dtype="float32")
    ).model
    adapter = lora.new_adapter(model, LoraSpec(rank=3))
    assert any(experts.is_pair(path) for path in adapter.pairs)
    peft_files.write(adapter, tmp_path, "base", model)
    found = peft_files.read(tmp_path)
    lora.check_fits(found, model)
    assert found.tensors.keys() == adapter.tensors.keys()


def test_attention_alone_leaves_the_experts_as_they_are(model: nn.Module) -> None:
    adapter = lora.new_adapter(model, LoraSpec(rank=4, train_mlp=False))
    assert not any(experts.is_pair(path) for path in adapter.pairs)
    inputs = routed()
    with lora.use([(adapter, 11)]):
        output = model.get_submodule(_PATH)(*inputs)
    torch.testing.assert_close(output, by_loop(model, None, *inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_without_pairs_on_its_experts_llama4_keeps_transformers_bits(threads: int) -> None:
    """Adapters on attention alone, trained before these experts could have any, replay to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architectures.config_of("llama4")).eval()
    tokens, found = torch.randint(3, 300, (1, 13)), []
    for _ in range(2):
        model.zero_grad()
        logits = model(tokens, use_cache=False).logits
        logits.square().sum().backward()
        found.append((logits, model.get_input_embeddings().weight.grad))
        experts.wrap(model, lambda: [(None, 1)])
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
