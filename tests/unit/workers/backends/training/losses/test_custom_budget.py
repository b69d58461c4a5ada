"""No custom loss, even a hostile one, exceeds its limits of memory and work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain.losses import CustomLoss
from app.errors import UserOpError
from tests.unit.workers.backends.training.losses.custom_graphs import (
    INPUTS,
    LOGPROBS,
    MATRIX,
    L,
    M,
    W,
    X,
    graph,
    node,
    run,
)
from workers.backends.training.losses import custom_budget

HUGE = 2**40
SIZE = node("n0", "torch.numel", L)
ALONE = node("a", "torch.neg", L)
long_row = node("long", "torch.arange", 100_000)
BOMBS: dict[str, list[dict[str, Any]]] = {
    "ones": [node("a", "torch.ones", HUGE)],
    "ones in two sizes": [node("a", "torch.ones", {"tuple": [2**20, 2**20]})],
    "arange": [node("a", "torch.arange", HUGE)],
    "linspace": [node("a", "torch.linspace", 0, 1, HUGE)],
    "full": [node("a", "torch.full", {"tuple": [HUGE]}, 1.0)],
    "new_zeros": [node("a", "new_zeros", L, {"tuple": [HUGE]}, method=True)],
    "expand": [node("u", "unsqueeze", L, 0, method=True), node("a", "expand", {"ref": "u"}, HUGE, 4, method=True)],
    "repeat": [node("a", "repeat", L, HUGE, method=True)],
    "repeat of a scalar": [node("s", "torch.sum", L), node("a", "repeat", {"ref": "s"}, HUGE, method=True)],
    "tile": [node("a", "torch.tile", L, {"tuple": [HUGE]})],
    "broadcast_to": [node("a", "torch.broadcast_to", L, {"tuple": [HUGE, 4]})],
    "one_hot": [node("a", "torch._C._nn.one_hot", X, HUGE)],
    "pad": [node("a", "torch.nn.functional.pad", L, {"tuple": [0, HUGE]})],
    "outer": [long_row, node("a", "torch.outer", {"ref": "long"}, {"ref": "long"})],
    "broadcast": [
        long_row,
        node("u", "unsqueeze", {"ref": "long"}, 1, method=True),
        node("a", "operator.mul", {"ref": "u"}, {"ref": "long"}),
    ],
    "a quotient of integers": [
        long_row,
        node("u", "unsqueeze", {"ref": "long"}, 1, method=True),
        node("a", "torch.div", {"ref": "u"}, {"ref": "long"}) | {"kwargs": {"rounding_mode": "trunc"}},
    ],
    "matmul": [
        long_row,
        node("f", "float", {"ref": "long"}, method=True),
        node("u", "unsqueeze", {"ref": "f"}, 1, method=True),
        node("v", "unsqueeze", {"ref": "f"}, 0, method=True),
        node("a", "operator.matmul", {"ref": "u"}, {"ref": "v"}),
    ],
    "a sum over no rows": [
        node("z", "new_zeros", L, {"tuple": [0, HUGE]}, method=True),
        node("a", "torch.sum", {"ref": "z"}, 0),
    ],
    "all of no rows": [
        node("z", "new_zeros", L, {"tuple": [0, HUGE]}, method=True),
        node("a", "torch.all", {"ref": "z"}, 0),
    ],
    "index": [
        long_row,
        node("z", "torch.zeros_like", {"ref": "long"}),
        node("e", "expand", {"ref": "z"}, 1_000, 100_000, method=True),
        node("a", "operator.getitem", L, {"ref": "e"}),
    ],
}
RUNAWAYS: dict[str, list[dict[str, Any]]] = {
    "expand beyond 64 bits": [
        node("u", "reshape", L, {"tuple": [4, 1, 1]}, method=True),
        node("a", "expand", {"ref": "u"}, 4, HUGE, HUGE, method=True),
    ],
    "integers that grow": [
        SIZE,
        *(node(f"n{i + 1}", "operator.mul", {"ref": f"n{i}"}, {"ref": f"n{i}"}) for i in range(9)),
        ALONE,
    ],
    "a tensor to write into": [
        node("z", "torch.zeros_like", M),
        node("a", "torch.nn.functional.normalize", M, 2, 0, 0.5, {"ref": "z"}),
    ],
    "a huge power": [SIZE, node("p", "operator.pow", {"ref": "n0"}, HUGE), ALONE],
    "a list that repeats": [node("p", "operator.mul", [1], HUGE), ALONE],
    "a text that grows": [node("p", "operator.mod", "mean", HUGE), ALONE],
    "a size that repeats": [
        node("s", "getattr", L, "shape"),
        node("p", "operator.mul", {"ref": "s"}, HUGE),
        ALONE,
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_what_would_not_fit_is_refused_before_it_is_made(case: str) -> None:
    peak = peak_bytes()
    with pytest.raises(UserOpError, match=r"node a \(.*: LimitReached: .* bytes for one datum"):
        run(graph(*BOMBS[case]), INPUTS).differentiate(0, LOGPROBS)
    assert peak_bytes() - peak < 64 * 2**20


@pytest.mark.parametrize("case", RUNAWAYS)
def test_what_python_would_let_grow_is_refused(case: str) -> None:
    with pytest.raises(UserOpError, match=r"TypeError|OverflowError|RuntimeError"):
        run(graph(*RUNAWAYS[case]), INPUTS).differentiate(0, LOGPROBS)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("divisor", [-1, 2**63 - 1])
@pytest.mark.parametrize("is_method", [True, False])
def test_a_quotient_that_would_end_the_process_is_refused(dtype: str, divisor: int, is_method: bool) -> None:
    """A large divisor becomes -1 in narrower integers."""
    least = torch.iinfo(getattr(torch, dtype)).min
    row = node("n", "new_full", L, {"tuple": [2]}, least, method=True) | {"kwargs": {"dtype": {"dtype": dtype}}}
    quotient = node("a", "div" if is_method else "torch.div", {"ref": "n"}, divisor, method=is_method)
    loss = run(graph(row, quotient | {"kwargs": {"rounding_mode": "trunc"}}), INPUTS)
    if divisor == -1 or dtype != "int64":
        with pytest.raises(UserOpError, match=r"node a .*OverflowError: the least torch.int"):
            loss.differentiate(0, LOGPROBS)
    else:
        loss.differentiate(0, LOGPROBS)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def evaluated(loss: CustomLoss, datums: int) -> Tensor:
    """Losses of that many equal datums of one Op."""
    found = run(loss, *[INPUTS] * datums).evaluate(np.arange(datums), LOGPROBS.expand(datums, 4)[:, :, None])
    return found[0]


def test_many_small_results_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = graph(*(node(f"a{i}", "torch.exp", M) for i in range(20)))
    assert evaluated(loss, 1).isfinite().all()
    monkeypatch.setattr("workers.backends.training.losses.custom_budget.MAX_BYTES", 15 * MATRIX.nbytes)
    with pytest.raises(UserOpError, match=r"node a1\d \(torch.exp\): LimitReached: .* bytes for one datum"):
        run(loss, INPUTS).differentiate(0, LOGPROBS)


def test_the_backward_pass_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = graph(node("a", "torch.cumprod", W, 0), node("b", "torch.cumprod", L, 0))
    monkeypatch.setattr("workers.backends.training.losses.custom_budget.MAX_BYTES", 400)
    with pytest.raises(UserOpError, match=r"node loss \(the loss\): LimitReached"):
        run(loss, INPUTS).differentiate(0, LOGPROBS)


def test_an_ops_work_is_shared_by_its_datums_so_that_time_is_bounded_without_a_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = graph(node("a", "torch.exp", L))
    monkeypatch.setattr("workers.backends.training.losses.custom.MAX_WORK", 64 * custom_budget.CALL_WORK)
    assert evaluated(loss, 2).isfinite().all()
    assert evaluated(loss, 64).isnan().all()
    with pytest.raises(UserOpError, match=r"datum 7: .* LimitReached: .* send fewer datums"):
        run(loss, *[INPUTS] * 64).explain(7, LOGPROBS.repeat(64))


def test_the_multiplications_of_a_matrix_product_are_work() -> None:
    product = [
        node("a", "torch.ones", {"tuple": [3000, 3000]}),
        node("b", "operator.matmul", {"ref": "a"}, {"ref": "a"}),
    ]
    with pytest.raises(UserOpError, match=r"node b \(operator.matmul\): LimitReached: it needs more work"):
        run(graph(*product), INPUTS).differentiate(0, LOGPROBS)


@pytest.mark.parametrize(
    ("method", "fits"), [("abs", True), ("flip", True), ("logit", False), ("softmax", False), ("sort", False)]
)
def test_an_element_counts_for_what_it_costs(monkeypatch: pytest.MonkeyPatch, method: str, fits: bool) -> None:
    monkeypatch.setattr("workers.backends.training.losses.custom.MAX_WORK", 64 * custom_budget.CALL_WORK)
    many = node("a", "torch.full", {"tuple": [100_000]}, 0.5)
    loss = graph(
        many,
        node("b", method, {"ref": "a"}, *([] if method in ("abs", "logit") else [0]), method=True),
        ALONE | {"name": "c"},
    )
    assert bool(evaluated(loss, 1).isfinite()) == fits


def test_a_complex_number_is_refused() -> None:
    root = [node("r", "operator.pow", -8.0, 0.5), node("a", "operator.mul", L, {"ref": "r"})]
    with pytest.raises(UserOpError, match=r"node r \(operator.pow\): TypeError: the result is a complex number"):
        run(graph(*root), INPUTS).differentiate(0, LOGPROBS)


def test_a_loss_of_an_earlier_version_replays_within_the_limits_that_it_ran_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.backends.training.losses.custom.MAX_WORK", 64 * custom_budget.CALL_WORK)
    many = node("a", "torch.full", {"tuple": [100_000]}, 0.5)
    loss = graph(many, node("b", "torch.logit", {"ref": "a"}), ALONE | {"name": "c"})
    assert evaluated(loss, 1).isnan().all()
    assert evaluated(replace(loss, budget=1), 1).isfinite().all()


def test_memory_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = graph(node("a", "torch.ones", {"tuple": [10_000]}), node("b", "double", {"ref": "a"}, method=True))
    monkeypatch.setattr("workers.backends.training.losses.custom_budget.MAX_BYTES", 130_000)
    assert evaluated(graph(node("a", "torch.ones", {"tuple": [10_000]}), ALONE | {"name": "c"}), 1).isfinite().all()
    with pytest.raises(UserOpError, match=r"node b \(double\): LimitReached: .* bytes"):
        run(loss, INPUTS).differentiate(0, LOGPROBS)


@pytest.mark.parametrize(("dtype", "limit"), [("bool", 85_000), ("int32", 115_000)])
def test_a_scalar_of_another_kind_widens_a_result(monkeypatch: pytest.MonkeyPatch, dtype: str, limit: int) -> None:
    calls = [
        node("n", "torch.ones", {"tuple": [10_000]}) | {"kwargs": {"dtype": {"dtype": dtype}}},
        node("s", "torch.ones", {"tuple": []}) | {"kwargs": {"dtype": {"dtype": "float64"}}},
        node("b", "operator.mul", {"ref": "n"}, {"ref": "s"}),
    ]
    monkeypatch.setattr("workers.backends.training.losses.custom_budget.MAX_BYTES", limit)
    with pytest.raises(UserOpError, match=r"node b \(operator.mul\): LimitReached: .* bytes"):
        run(graph(*calls), INPUTS).differentiate(0, LOGPROBS)
