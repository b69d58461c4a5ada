"""Grouped products of adapters on a CPU, beside the runs that a CPU uses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from app.domain.ops import LoraSpec
from workers.backends.training.memory import _recomputed
from workers.models import lora
from workers.models.adapter import Adapter, LoraPair
from workers.models.products import grouped

Segments = Sequence[tuple[Adapter | None, int]]


class Layer(nn.Module):
    """Linears of attention and of an MLP, as wide as grouped products need them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=False)
        self.k_proj = nn.Linear(16, 8)
        self.v_proj = nn.Linear(16, 24)
        self.gate_proj = nn.Linear(24, 40)
        self.up_proj = nn.Linear(24, 40)
        self.down_proj = nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q_proj(x).sigmoid() * self.v_proj(x) + self.k_proj(x).sum(-1, keepdim=True)
        out: Tensor = self.down_proj(self.gate_proj(heads).tanh() * self.up_proj(heads))
        return x + out


@pytest.fixture(params=["joined", "hooked"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A base whose linears are computed in one function with their adapters, or not, because each has a hook."""
    torch.manual_seed(0)
    model = Layer().requires_grad_(False)
    lora.wrap(model)
    for linear in [one for one in model.modules() if type(one) is nn.Linear and request.param == "hooked"]:
        linear.register_forward_hook(lambda *_: None)
    return model


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes linears use grouped products from now on."""

    def start() -> None:
        monkeypatch.setattr(grouped, "has_kernels", lambda device, dtype: True)

    return start


def adapter(model: nn.Module, rank: int, alpha: float = 32.0, *, train_mlp: bool = True) -> Adapter:
    """A packed adapter."""
    made = lora.new_adapter(model, LoraSpec(rank=rank, seed=rank, alpha=alpha, train_mlp=train_mlp))
    for pair in made.pairs.values():
        nn.init.normal_(pair.b, std=0.1)
    return made.to(torch.device("cpu"))


def unpacked(segments: Segments) -> Segments:
    """The same shares of adapters whose tensors are parts of no other."""
    others = {one: Adapter(one.spec, one.pairs, one.value_head) for one, _ in segments if one is not None}
    return [(one and others[one], count) for one, count in segments]


CASES: dict[str, Callable[[nn.Module], Segments]] = {
    "uneven": lambda model: [(adapter(model, 8), 3), (adapter(model, 8), 5), (adapter(model, 8), 1)],
    "alone": lambda model: [(adapter(model, 5), 9)],
    "ranks and scalings": lambda model: [(adapter(model, 3, 12.0), 4), (adapter(model, 9), 2), (adapter(model, 5), 3)],
    "rows without an adapter": lambda model: [(None, 2), (adapter(model, 8), 3), (None, 1), (adapter(model, 4), 3)],
    "none for the last": lambda model: [(adapter(model, 8), 3), (adapter(model, 8), 4), (None, 2)],
    "no MLP": lambda model: [(adapter(model, 8, train_mlp=False), 2), (adapter(model, 8), 7)],
    "no MLP at all": lambda model: [(adapter(model, 8, train_mlp=False), 2), (None, 7)],
    "two shares of one": lambda model: [(one := adapter(model, 8), 2), (adapter(model, 8), 6), (one, 1)],
    "the base alone": lambda model: [(None, 9)],
}


def learnt(
    model: nn.Module, segments: Segments, layer: Callable[[Tensor], Tensor] | None = None, *, rows: int = 1
) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter, for x of `rows` tokens a share."""
    x = torch.randn(9, rows, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with lora.use(segments):
        out = (layer or model)(x)
    out.square().sum().backward()
    assert x.grad is not None
    adapters = dict.fromkeys(one for one, _ in segments if one is not None)
    return [out.detach(), x.grad, *(gradient for one in adapters for gradient in taken(one))]


def taken(one: Adapter) -> list[Tensor]:
    """Takes the gradient of every parameter of an adapter, packed or not."""
    if one.flat is None:
        found = [p.grad for p in one.tensors.values() if p.grad is not None]
    else:
        parts = one.layout.parts(one.gradient())
        found = [parts[name] for name in one.tensors]
    for gradient, parameter in zip(found, one.tensors.values(), strict=True):
        assert gradient.stride() == parameter.stride()
    one.drop_gradients()
    return found


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_grouped_products_learn_the_same_as_runs(
    case: str, rows: int, model: nn.Module, group: Callable[[], None]
) -> None:
    segments = CASES[case](model)
    wanted = learnt(model, segments, rows=rows)
    group()
    assert_same(learnt(model, segments, rows=rows), wanted)
    assert_same(learnt(model, unpacked(segments), rows=rows), wanted)


def test_an_adapter_with_gaps_between_its_tensors_learns_the_same(group: Callable[[], None]) -> None:
    """B of a linear of 4 outputs has 32 elements. In the adapter's flat tensor a gap follows them, in stacks none."""
    torch.manual_seed(0)
    layer = Layer()
    layer.k_proj = nn.Linear(16, 4)
    lora.wrap(layer.requires_grad_(False))
    segments = [(adapter(layer, 8), 3), (adapter(layer, 8), 6)]
    wanted = learnt(layer, segments)
    group()
    assert_same(learnt(layer, segments), wanted)


@pytest.mark.parametrize("rank", [8, 16], ids=["row", "no_row"])
def test_a_pass_of_two_micro_batches_adds_up_however_each_stacks_its_adapters(
    rank: int, model: nn.Module, group: Callable[[], None]
) -> None:
    """The adapter is a row of the first stacks, and beside one of another rank no row of the second ones."""
    group()
    one = adapter(model, 8)
    segments: list[Segments] = [[(one, 4)], [(one, 2), (adapter(model, rank), 7)]]
    found = []
    for chosen in (segments[:1], segments[1:], segments):
        for each in chosen:
            with lora.use(each):
                model(torch.ones(sum(count for _, count in each), 16)).square().sum().backward()
        found.append(taken(one))
    assert_same(found[2], [first + later for first, later in zip(*found[:2], strict=True)])


def test_a_base_that_is_called_without_adapters_has_its_own_output(model: nn.Module, group: Callable[[], None]) -> None:
    wanted = model(torch.ones(9, 16))
    group()
    assert_same([model(torch.ones(9, 16))], [wanted])


def test_gradients_reach_parameters_of_which_a_pass_has_a_part(model: nn.Module, group: Callable[[], None]) -> None:
    """As under tensor parallelism, beside an adapter that the pass has whole. A second pass adds to the first."""
    group()
    whole, other = adapter(model, 8), adapter(model, 8)

    def split() -> Adapter:
        parts = {path: (pair.a[:], pair.b * 1) for path, pair in whole.pairs.items()}
        return Adapter(whole.spec, {path: LoraPair(*cast(Any, both)) for path, both in parts.items()})

    found = []
    for made in (lambda: whole, split):
        for _ in range(2):
            with lora.use([(other, 4), (made(), 5)]):
                out = model(torch.ones(9, 16))
            out.square().sum().backward()
        found.append([*taken(whole), *taken(other)])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("case", CASES)
def test_grouped_products_infer_the_same_as_runs(case: str, model: nn.Module, group: Callable[[], None]) -> None:
    segments, x = CASES[case](model), torch.randn(9, 2, 16)
    with lora.use(segments), torch.inference_mode():
        wanted = model(x)
        group()
        assert_same([model(x)], [wanted])


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch, group: Callable[[], None]) -> list[int]:
    """Uses grouped products, and gets the number of linears whenever stacks are made."""
    made: list[int] = []
    real = grouped.stacked

    def noted(
        groups: Sequence[Mapping[str, grouped.Pairs]], segments: Sequence[grouped.Segment], like: Tensor
    ) -> tuple[dict[str, grouped.Stack], grouped.Gradients]:
        made.append(sum(map(len, groups)))
        return real(groups, segments, like)

    monkeypatch.setattr(grouped, "stacked", noted)
    group()
    return made


def test_a_pass_stacks_its_adapters_once_though_layers_run_again(model: nn.Module, stacked: list[int]) -> None:
    segments = CASES["uneven"](model)
    wanted = learnt(model, segments)
    stacked.clear()
    assert_same(learnt(model, segments, lambda x: _recomputed(model, x)), wanted)
    assert stacked == [6]


def test_a_layer_that_runs_datum_by_datum_stacks_nothing(model: nn.Module, stacked: list[int]) -> None:
    """As recurrent layers do. The second part begins within a segment."""

    def by_parts(x: Tensor) -> Tensor:
        segments, parts = lora.in_use(), []
        for rows in (slice(0, 4), slice(4, 9)):
            with lora.use(segments.part(rows)):
                parts.append(model(x[rows]))
        return torch.cat(parts)

    segments = CASES["ranks and scalings"](model)
    wanted = learnt(model, segments)
    stacked.clear()
    assert_same(learnt(model, segments, by_parts), wanted)
    assert stacked == [6]


def test_a_linear_that_a_pass_uses_twice_learns_from_both_uses(model: nn.Module, group: Callable[[], None]) -> None:
    """As layers that a model shares do. A second pass adds to the first."""
    one, x, found = adapter(model, 8), torch.randn(9, 16), []
    linear = model.get_submodule("q_proj")
    for _ in range(2):
        for _ in range(2):
            with lora.use([(one, 9)]):
                out = linear(x) * linear(2 * x)
            out.sum().backward()
        found.append(taken(one))
        group()
    assert_same(found[1], found[0])


def test_parts_add_their_gradients_to_those_of_the_pass(model: nn.Module, group: Callable[[], None]) -> None:
    """A pass may have many parts, and gradients of whole adapters for each would not fit into memory."""
    group()
    with lora.use([(adapter(model, 8), 4), (adapter(model, 8), 4)]):
        whole = lora.in_use()
        with lora.use(whole.part(slice(4, 8))):
            model(torch.ones(4, 16))
            assert lora.in_use().gradients(torch.float32) is whole.gradients(torch.float32)


def test_an_output_that_nothing_took_is_dropped(model: nn.Module, group: Callable[[], None]) -> None:
    """As when memory runs out between two linears that were computed together."""
    group()
    segments = lora.StackedSegments([(adapter(model, 8), 9)])
    with pytest.raises(MemoryError), lora.use(segments):
        model.get_submodule("gate_proj")(torch.ones(9, 24))
        raise MemoryError
    assert not segments.ready


def test_the_gradient_of_an_adapter_keeps_no_other_in_memory(model: nn.Module, group: Callable[[], None]) -> None:
    group()
    adapters = [adapter(model, 8), adapter(model, 8)]
    with lora.use([(one, 3) for one in adapters]):
        out = model(torch.ones(6, 16))
    out.sum().backward()
    places = {
        one.gradient().untyped_storage().data_ptr(): one.gradient().untyped_storage().nbytes() for one in adapters
    }
    assert [*places.values()] == [one.whole.untyped_storage().nbytes() for one in adapters]


def test_a_backward_pass_that_fails_leaves_nothing_in_memory(model: nn.Module, group: Callable[[], None]) -> None:
    """As when memory runs out. A garbage collection would come too late for the next try."""

    def fail(_: Tensor) -> None:
        raise MemoryError

    group()
    gc.collect()
    gc.disable()
    try:
        with lora.use([(adapter(model, 8), 9)]):
            heads = model.get_submodule("q_proj")(torch.ones(9, 16))
            heads.register_hook(fail)
            out = model.get_submodule("down_proj")(model.get_submodule("up_proj")(heads))
            kept = weakref.ref(lora.in_use().gradients(torch.float32))
        with pytest.raises(MemoryError):
            out.sum().backward()
        assert kept() is not None
        del heads, out
        assert kept() is None
    finally:
        gc.enable()


def test_steps_with_the_same_segments_share_their_stacks(model: nn.Module, stacked: list[int]) -> None:
    segments = lora.StackedSegments(CASES["uneven"](model))
    for _ in range(2):
        with lora.use(segments), torch.inference_mode():
            model(torch.ones(9, 16))
    assert stacked == [6]


def test_the_next_pass_sees_changed_weights(model: nn.Module, group: Callable[[], None]) -> None:
    segments = CASES["uneven"](model)
    before = learnt(model, segments)
    for one, _ in segments:
        assert one is not None
        one.pairs["q_proj"].b.data.mul_(2)
    wanted = learnt(model, segments)
    for one, _ in segments:
        assert one is not None
        one.pairs["q_proj"].b.data.div_(2)
    group()
    assert_same(learnt(model, segments), before)
    for one, _ in segments:
        assert one is not None
        one.pairs["q_proj"].b.data.mul_(2)
    assert_same(learnt(model, segments), wanted)


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_may_lie_in_columns(inference: bool, model: nn.Module, group: Callable[[], None]) -> None:
    x = torch.randn(16, 9).t()
    group()
    with lora.use(CASES["uneven"](model)), torch.inference_mode(inference):
        assert_same([model(x)], [model(x.contiguous())])


def test_a_linear_is_joined_with_its_adapters_unless_something_must_see_it(group: Callable[[], None]) -> None:
    class Own(nn.Linear):
        """Such as a quantised one."""

    group()
    x, frozen = torch.ones(2, 8), nn.Linear(8, 8).requires_grad_(False)
    assert grouped.joins(frozen, x, 2)
    assert not grouped.joins(nn.Linear(8, 8), x, 2), "its weight would get no gradient"
    assert not grouped.joins(Own(8, 8).requires_grad_(False), x, 2)
    assert not grouped.joins(nn.Linear(6, 8).requires_grad_(False), torch.ones(2, 6), 2)
    replaced = nn.Linear(8, 8).requires_grad_(False)
    vars(replaced)["forward"] = torch.relu
    assert not grouped.joins(replaced, x, 2), "its own product is left out"
    frozen.register_forward_pre_hook(lambda *_: None)
    assert not grouped.joins(frozen, x, 2)


def test_linears_that_read_the_same_input_are_one_function(group: Callable[[], None]) -> None:
    """The first one that is called computes all of them, unless another has a hook."""
    group()
    torch.manual_seed(0)
    model = Layer().requires_grad_(False)
    lora.wrap(model)
    names = {
        name for name in ("q_proj", "k_proj", "v_proj") if _functions(model, name) == {"q_proj", "k_proj", "v_proj"}
    }
    assert names == {"q_proj", "k_proj", "v_proj"}
    assert _functions(model, "up_proj") == {"gate_proj", "up_proj"}
    assert _functions(model, "down_proj") == {"down_proj"}
    model.k_proj.base.register_forward_hook(lambda *_: None)
    assert _functions(model, "q_proj") == {"q_proj"}


def _functions(model: Layer, first: str) -> set[str]:
    """The linears that are computed when one of them is called."""
    segments = lora.StackedSegments([(adapter(model, 8), 3), (adapter(model, 8), 6)])
    linear = model.get_submodule(first)
    assert isinstance(linear, lora.LoraLinear)
    with lora.use(segments):
        linear(torch.ones(9, linear.base.in_features))
        return {first, *segments.ready}


def test_a_linear_that_reads_another_input_after_all_is_computed_for_that(group: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model = Layer().requires_grad_(False)
    lora.wrap(model)
    segments, one, other = CASES["uneven"](model), torch.randn(9, 16), torch.randn(9, 16)
    with lora.use(segments):
        wanted = model.k_proj(other)
        group()
        with lora.use(segments):
            model.q_proj(one)
            assert_same([model.k_proj(other)], [wanted])


def test_an_input_without_a_gradient_costs_no_product_for_it(group: Callable[[], None]) -> None:
    """As in the first layer, below which nothing is trained."""
    model = nn.Sequential()
    model.q_proj = nn.Linear(16, 24).requires_grad_(False)
    lora.wrap(model)
    one, flops = adapter(model, 8), []
    counts = {torch.ops.aten.addmm_: lambda out, left, right, **_: 2 * prod(left) * right[1]}
    group()
    for wanted in (False, True):
        with lora.use([(one, 9)]), FlopCounterMode(display=False, custom_mapping=counts) as counter:
            model.q_proj(torch.ones(9, 16, requires_grad=wanted)).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[1] - flops[0] == 2 * 9 * 16 * (24 + 8)


def test_widths_without_a_kernel_run_one_by_one(model: nn.Module, group: Callable[[], None]) -> None:
    """Rows of 6 numbers are no multiple of 16 bytes, which the grouped products refuse."""
    group()
    assert not grouped.suits(torch.ones(2, 6), torch.ones(2, 8), 2)
    assert not grouped.suits(torch.ones(2, 8), torch.ones(2, 6), 2)
    assert grouped.suits(torch.ones(2, 8), torch.ones(2, 8), 2)


def test_more_segments_than_a_kernel_takes_run_one_by_one(
    model: nn.Module, group: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = CASES["uneven"](model)
    wanted = learnt(model, segments)
    group()
    monkeypatch.setattr(grouped, "MOST_GROUPS", 2)
    monkeypatch.delattr(nn.functional, "grouped_mm")
    assert_same(learnt(model, segments), wanted)


def test_a_cpu_has_no_kernel_for_grouped_products() -> None:
    assert not grouped.has_kernels(torch.device("cpu"), torch.bfloat16)
