"""Custom losses give the client's results for every operation they may call, and explain each failure."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.lib.public_interfaces.custom_loss import run_loss_handle
from torch import Tensor
from torch.fx.node import _get_qualified_name

from app.domain import losses as names
from app.errors import NoMemory, UserOpError
from tests.custom_losses import DPO_RANKS, SDFT_RANKS, dpo, handle, parsed, sdft
from tests.unit.workers.backends.training.losses.custom_graphs import (
    INDEX,
    INPUTS,
    LOGPROBS,
    B,
    L,
    M,
    T,
    W,
    X,
    graph,
    node,
    run,
)
from workers.backends.training.losses.custom import FUNCTIONS, METHODS

# --- the tables ---


def test_the_names_that_are_allowed_are_those_that_can_run() -> None:
    assert FUNCTIONS.keys() == names.FUNCTIONS
    assert METHODS.keys() == names.METHODS


def test_every_function_is_the_one_the_sdk_means_by_its_name() -> None:
    for name, function in FUNCTIONS.items():
        if name.startswith("torch."):
            assert _get_qualified_name(function) == name
    for name in names.METHODS:
        assert METHODS[name] is getattr(Tensor, name)


# --- equal to the client, Op by Op ---

FLOAT32, PAIR = {"dtype": "float32"}, {"tuple": [2, 2]}
# Arguments tried on every operation; the accepted ones are the test.
PATTERNS: list[list[Any]] = [
    [L], [W], [L, W], [L, W, W], [W, W], [L, 0], [L, 1], [L, 2.0], [M, M], [M, W], [M, 0, 1], [L, L], [B], [B, B],
    [B, L, W], [[L, W]], [[L, W], 0], [4], [PAIR], [PAIR, 1.5], [L, PAIR], [L, {"tuple": [0]}], [L, "shape"], [M,
    "T"], [M, "mT"], [L, "dtype"], [L, "device"], [L, "ndim"], [{"ref": "pair"}, "values"], [{"ref": "pair"},
    "indices"], [M, 1], [X, 5], [L, 0, X], [L, 0, X, W], [L, 0, 1, 2], [L, B, 0.5], [L, -2, -0.2], [L, W, 0.3], [T,
    T], [L, FLOAT32], [2.5], [3, 2], [L, {"tuple": [1, 1]}], [0, 1, 5], [0, 4], [L, X], [L, B], [L, {"slice": [1,
    None, 2]}], [L, {"ellipsis": True}], [L, {"tuple": [{"slice": [None, -1, None]}, None]}], [M, B], [M, {"tuple":
    [B, X]}], [X], [M, {"tuple": [1, B]}], [L, {"tuple": [3]}, 0.5], [M, 2, 1], [W, {"float": "inf"}], [L, 3], [M,
    {"tuple": [2, 8]}], [L, W, L, 0.5], [T, 0], [L, {"tuple": [4, 4]}], [[L, L, W], -1], [L, M], [L, W, -0.5],
    [INDEX.tolist(), 1],
]  # fmt: skip


def reference(calls: list[dict[str, Any]], leaf: Tensor) -> Any:
    """The last call's result, by plain torch and torch's own names."""
    found: dict[str, Any] = {**{name: value.clone() for name, value in INPUTS.items()}, "logprobs": leaf}
    for call in calls:
        args = [value_of(arg, found) for arg in call["args"]]
        if call["op"] == "call_method":
            found[call["name"]] = getattr(args[0], call["target"])(*args[1:])
        else:
            found[call["name"]] = imported(call["target"])(*args)
    return found[calls[-1]["name"]]


def imported(target: str) -> Callable[..., Any]:
    if target == "getattr":
        return getattr
    module, _, name = target.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def value_of(arg: Any, found: dict[str, Any]) -> Any:
    if isinstance(arg, list):
        return [value_of(part, found) for part in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, inner),) = arg.items()
    simple = {"ref": found.get, "dtype": lambda name: getattr(torch, name), "float": float, "ellipsis": lambda _: ...}
    if kind in simple:
        return simple[kind](inner)
    return {"tuple": tuple, "slice": lambda parts: slice(*parts)}[kind](value_of(inner, found))


SETUP = [
    node("mask", "operator.gt", L, -1.0),
    node("stacked", "unsqueeze", M, 0, method=True),
    node("pair", "sort", L, method=True),
]


def cases() -> Iterator[tuple[str, bool]]:
    yield from ((name, False) for name in sorted(names.FUNCTIONS))
    yield from ((name, True) for name in sorted(names.METHODS))


@pytest.mark.filterwarnings("ignore")
def test_every_allowed_operation_gives_what_it_gives_on_the_client() -> None:
    """Value and gradient agree, and none is refused: an operation the limits cannot predict would be refused."""
    untested = set()
    for name, method in cases():
        agreed = (args for args in PATTERNS if agrees(name, method, args))
        # Most methods are aliases of functions.
        if not list(islice(agreed, 1 if method else 5)):
            untested.add(name)
    assert untested == set()


def agrees(name: str, method: bool, args: list[Any]) -> bool:
    """Returns False when the operation does not accept these arguments, or returns nothing to differentiate."""
    if name != "getattr" and isinstance(args[-1], str):
        return False
    return compared([*SETUP, node("result", name, *args, method=method)])


def compared(calls: list[dict[str, Any]]) -> bool:
    """Asserts that the last call has the client's result: of a tuple or size its first and last item, of a number its
    product with the logprobs. Returns False when there is nothing to differentiate."""
    leaf, last = LOGPROBS.clone().requires_grad_(), {"ref": calls[-1]["name"]}
    try:
        result = reference(calls, leaf)
        total = result.float().sum() if isinstance(result, Tensor) else torch.zeros(())
        (expected,) = torch.autograd.grad(total + leaf.sum(), leaf)
    except Exception:
        return False
    if isinstance(result, tuple) and result:
        first, at_end = (compared([*calls, node("item", "operator.getitem", last, place)]) for place in (0, -1))
        return first and at_end
    if isinstance(result, int | float) and not isinstance(result, bool):
        return compared([*calls, node("product", "operator.mul", L, last)])
    if not isinstance(result, Tensor):
        return not isinstance(result, bool | list) and runs(calls)
    if not (total.isfinite() and expected.isfinite().all()):
        return False
    found = run(graph(*calls), INPUTS).differentiate(0, LOGPROBS)
    assert found.metrics["custom/total:sum"] == total.item(), calls
    assert torch.equal(found.gradient, expected), calls
    return True


def runs(calls: list[dict[str, Any]]) -> bool:
    """Runs an operation whose result is a type: it is computed beside a separate loss."""
    beside = [*calls, node("last", "torch.neg", L)]
    return bool(run(graph(*beside), INPUTS).differentiate(0, LOGPROBS).gradient.numel())


# --- equal to the client, loss by loss ---


def random_datum(ranks: dict[str, int], length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {0: (), 1: (length,), 2: (length, 3)}
    return {name: torch.randn(shapes[rank], generator=generator) for name, rank in ranks.items()}


def on_the_client(fn: Any, ranks: dict[str, int], datums: list[dict[str, Tensor]]) -> tuple[float, dict, list[Tensor]]:
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([0]),
            loss_fn_inputs={
                name: types.TensorData(data=value.flatten().tolist(), dtype="float32", shape=list(value.shape))
                for name, value in datum.items()
                if name != "logprobs"
            },
        )
        for datum in datums
    ]
    leaves = [datum["logprobs"].clone().requires_grad_() for datum in datums]
    total, metrics = run_loss_handle(handle(fn, ranks), data, leaves)
    total.backward()
    return total.item(), metrics, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(("fn", "ranks"), [(dpo, DPO_RANKS), (sdft, SDFT_RANKS)])
def test_a_padded_batch_gives_what_the_sdk_computes_datum_by_datum(fn: Any, ranks: dict[str, int]) -> None:
    datums = [random_datum(ranks, length, seed) for seed, length in enumerate((5, 2, 7))]
    total, metrics, gradients = on_the_client(fn, ranks, datums)
    order = np.array([2, 0, 1])
    padded = torch.zeros(3, 7, 3 if ranks["logprobs"] == 2 else 1)
    for row, datum in enumerate(order):
        scores = datums[datum]["logprobs"]
        padded[row, : len(scores)] = scores if scores.ndim == 2 else scores[:, None]
    losses, found, gradient = run(parsed(fn, ranks), *datums).evaluate(order, padded)
    assert losses.sum().item() == pytest.approx(total, rel=1e-6)
    for name, value in metrics.items():
        mean = found[name].double().sum().item() / (3 if name.endswith(":mean") else 1)
        assert mean == pytest.approx(value, rel=1e-6)
    for row, datum in enumerate(order):
        expected = gradients[datum]
        real = gradient[row, : len(expected)]
        assert torch.equal(real if expected.ndim == 2 else real[:, 0], expected)
        assert not gradient[row, len(expected) :].any()


# --- whatever the graph ---

_NUMBERS = [0, 1, -1, 2, 0.5, -3.0]
_UNARY = [
    "torch.exp",
    "torch.abs",
    "torch.sigmoid",
    "operator.neg",
    "torch.square",
    "torch.relu",
    "torch._C._nn.log_sigmoid",
]
_BINARY = [
    "operator.add", "operator.sub", "operator.mul", "operator.truediv", "operator.pow", "operator.gt", "operator.mod",
    "operator.matmul", "operator.getitem", "operator.floordiv", "torch.minimum", "torch.maximum", "torch.outer",
    "torch.logaddexp", "torch.where",
]  # fmt: skip
_REDUCING = [
    "sum",
    "mean",
    "amax",
    "cumsum",
    "logsumexp",
    "softmax",
    "unsqueeze",
    "squeeze",
    "flip",
    "argsort",
    "std",
    "max",
]


@st.composite
def programs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls on the inputs, on each other's results and on numbers, most of them valid."""
    made = list(INPUTS)
    calls: list[dict[str, Any]] = []
    for i in range(draw(st.integers(1, 8))):
        operand = st.one_of(st.sampled_from(made).map(lambda name: {"ref": name}), st.sampled_from(_NUMBERS))
        kind = draw(st.sampled_from(["unary", "binary", "reducing", "shape"]))
        name = f"n{i}"
        if kind == "unary":
            calls.append(node(name, draw(st.sampled_from(_UNARY)), draw(operand)))
        elif kind == "binary":
            calls.append(node(name, draw(st.sampled_from(_BINARY)), draw(operand), draw(operand)))
        elif kind == "reducing":
            args = draw(st.sampled_from([[], [0], [-1], [1], [{"tuple": [0]}]]))
            calls.append(node(name, draw(st.sampled_from(_REDUCING)), draw(operand), *args, method=True))
        else:
            size = draw(st.sampled_from([[-1], [2, 2], [4, 1], [1, -1], [3]]))
            target = draw(st.sampled_from(["reshape", "expand", "repeat", "view"]))
            calls.append(node(name, target, draw(operand), {"tuple": size}, method=True))
        made.append(name)
    return calls


@settings(max_examples=200, deadline=None, derandomize=True)
@given(programs())
def test_any_graph_gives_what_torch_gives_or_the_clients_error(calls: list[dict[str, Any]]) -> None:
    leaf = LOGPROBS.clone().requires_grad_()
    try:
        total = reference(calls, leaf).float().sum()
        (expected,) = torch.autograd.grad(total + leaf.sum(), leaf)
        fits = bool(total.isfinite() and expected.isfinite().all())
    except Exception:
        fits = False
    if not fits:
        with pytest.raises(UserOpError, match="datum 0: the custom loss test fails: node "):
            run(graph(*calls), INPUTS).differentiate(0, LOGPROBS)
        return
    found = run(graph(*calls), INPUTS).differentiate(0, LOGPROBS)
    assert found.metrics["custom/total:sum"] == pytest.approx(total.item(), rel=1e-6, abs=1e-30)
    torch.testing.assert_close(found.gradient, expected, rtol=1e-6, atol=1e-30)


# --- what only running it can tell ---

FAILURES: dict[str, tuple[Any, str]] = {
    "a vector": (lambda logprobs: (logprobs * 2, {}), r"node mul \(the loss\): .*shape \[4\]"),
    "infinite": (lambda logprobs: ((logprobs - logprobs).sum() / 0 + 1 / (0 * logprobs.sum()), {}), "not finite"),
    "cut off": (lambda logprobs: (logprobs.detach().sum(), {}), "does not depend on logprobs"),
    "shapes": (
        lambda logprobs: ((logprobs + logprobs[:-1]).sum(), {}),
        r"node add \(operator.add\): RuntimeError: Att.* \[4\]",
    ),
    "no such dimension": (lambda logprobs: (logprobs.sum(dim=5), {}), r"node sum_1 \(sum\): IndexError"),
    "metric a vector": (lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs.exp()}), "custom/a:sum"),
    "metric not finite": (
        lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs.sum() / 0}),
        "custom/a:sum.* -inf",
    ),
    "a mask without rank": (lambda logprobs: (logprobs[logprobs.sum() > 0].sum(), {}), "a mask must have"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_loss_that_cannot_be_computed_says_at_which_datum_and_node(case: str) -> None:
    fn, why = FAILURES[case]
    fn.__name__ = "mine"
    found = run(parsed(fn, {"logprobs": 1}), INPUTS, INPUTS)
    assert found.evaluate(np.array([1]), LOGPROBS[None, :, None])[0].isnan().all()
    with pytest.raises(UserOpError, match=f"datum 1: the custom loss mine fails: .*{why}.* The model is unchanged"):
        found.explain(1, LOGPROBS.repeat(2))


def test_memory_that_is_short_is_no_fault_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Tensor) -> NoReturn:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setitem(METHODS, "exp", full)
    found = run(parsed(lambda logprobs: (logprobs.exp().sum(), {}), {"logprobs": 1}), INPUTS)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        found.evaluate(np.array([0]), LOGPROBS[None, :, None])
    with pytest.raises(NoMemory):
        found.explain(0, LOGPROBS)


def test_an_argument_that_reads_like_short_memory_is_the_fault_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts bad arguments, which the client chooses, into the texts of its errors."""

    def refused(_: Tensor) -> NoReturn:
        raise ValueError("{'DefaultCPUAllocator': 1} is not a valid value for reduction")

    monkeypatch.setitem(METHODS, "exp", refused)
    found = run(parsed(lambda logprobs: (logprobs.exp().sum(), {}), {"logprobs": 1}), INPUTS)
    found.evaluate(np.array([0]), LOGPROBS[None, :, None])
    with pytest.raises(UserOpError, match="not a valid value for reduction"):
        found.explain(0, LOGPROBS)


def test_integer_inputs_stay_integers_and_scalars_have_no_dimension() -> None:
    def pick(logprobs: Tensor, index: Tensor, scale: Tensor) -> Any:
        return (logprobs[index] * scale).sum() + logprobs.gather(0, index)[0], {"custom/ndim:sum": scale}

    datum = {"logprobs": LOGPROBS, "index": torch.tensor([3, 3]), "scale": torch.tensor(2.0)}
    found = run(parsed(pick, {"logprobs": 1, "index": 1, "scale": 0}), datum).differentiate(0, LOGPROBS)
    assert found.gradient.tolist() == [0.0, 0.0, 0.0, 5.0]


def test_a_datum_depends_on_nothing_but_itself() -> None:
    loss = parsed(dpo, DPO_RANKS)
    datums = [random_datum(DPO_RANKS, 6, seed) for seed in range(3)]
    together = run(loss, *datums)
    for i, datum in enumerate(datums):
        alone = run(loss, datum).differentiate(0, datum["logprobs"])
        found = together.differentiate(i, datum["logprobs"])
        assert (found.loss, found.metrics) == (alone.loss, alone.metrics)
        assert torch.equal(found.gradient, alone.gradient)
