"""The work that a custom loss's operation is charged covers the time it takes, for every operation of the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.workers.backends.training.losses.test_custom import PATTERNS, cases, imported, value_of
from workers.backends.training.losses import custom_budget

SIDE = 64
N = SIDE * SIDE
# A unit of work is 1 ns by the table. Where the cosines of fp64 beside a measurement, which the table prices at 16,
# take longer, the machine is slower or busy, and a unit may take as much longer.
MOST, REFERENCE_PRICE, PATTERNS_EACH, LARGEST = 8.0, 16, 2, 2**18
KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "fp32": lambda source: torch.randn(N, generator=source) * 9,
    "denormal fp32": lambda source: torch.rand(N, generator=source) * 1e-41,
    "fp64": lambda source: torch.randn(N, generator=source, dtype=torch.float64) * 1e30,
    "denormal fp64": lambda source: torch.rand(N, generator=source, dtype=torch.float64) * 1e-310,
    "bf16": lambda source: torch.randn(N, generator=source).bfloat16(),
    "int64": lambda source: torch.randint(-(2**62), 2**62, (N,), generator=source),
    "small int64": lambda source: torch.randint(1, 60, (N,), generator=source),
}


class Timed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects (time in ns, work) of each torch operation below; the faster of two runs where it changes nothing.

    Times are of this thread alone: a busy machine does not make them longer.
    """

    def __init__(self, found: dict[str, tuple[float, int]], kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._kind = found, kind

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.is_view:
            return func(*args, **given)
        inputs = list(custom_budget._tensors((*args, *given.values())))
        made = custom_budget.foretold(func, args, given, inputs)
        if made > LARGEST:
            raise MemoryError("an outer product or the like, whose elements cost what they cost elsewhere")
        work = custom_budget.work(func, inputs, made)
        times, out = [], None
        for _ in range(1 if func._schema.is_mutable else 2):
            start = time.thread_time()
            out = func(*args, **given)
            times.append((time.thread_time() - start) * 1e9)
        name = f"{func} of {self._kind}"
        took, before = min(times), self._found.get(name, (0.0, 1))
        if took * before[1] > before[0] * work:
            self._found[name] = took, work
        return out


def unit_ns() -> float:
    """Nanoseconds that one unit of work may take now, on this machine as it is."""
    values, times = torch.rand(N, dtype=torch.float64) * 1e30, []
    for _ in range(5):
        start = time.thread_time()
        torch.cos(values)
        times.append((time.thread_time() - start) * 1e9)
    return max(1.0, min(times) / (N * REFERENCE_PRICE))


def timed(kind: str, names: Sequence[tuple[str, bool]]) -> dict[str, tuple[float, int]]:
    source = torch.Generator().manual_seed(1)
    values = KINDS[kind](source)
    columns = {
        "weights": values.clone(),
        "matrix": values.reshape(SIDE, SIDE),
        "index": torch.arange(SIDE).repeat(SIDE),
    }
    found: dict[str, tuple[float, int]] = {}
    for name, method in names:
        # A pattern that the operation does not take costs nothing.
        list(
            islice((args for args in PATTERNS if ran(name, method, args, values, columns, found, kind)), PATTERNS_EACH)
        )
    return found


def ran(
    name: str,
    method: bool,
    args: list[Any],
    values: Tensor,
    columns: Mapping[str, Tensor],
    found: dict[str, tuple[float, int]],
    kind: str,
) -> bool:
    if name == "getattr" or isinstance(args[-1], str):
        return False
    leaf = values.clone().requires_grad_(values.is_floating_point())
    nodes = {**columns, "logprobs": leaf}
    nodes |= {"mask": leaf > -1, "stacked": columns["matrix"][None], "pair": leaf.sort()}
    try:
        given = [value_of(arg, nodes) for arg in args]
        with Timed(found, kind):
            out = getattr(given[0], name)(*given[1:]) if method else imported(name)(*given)
            out = out[0] if isinstance(out, tuple) and out else out
            if isinstance(out, Tensor) and out.requires_grad:
                torch.autograd.grad(out.float().sum(), leaf, allow_unused=True)
    except Exception:
        return False
    return True


def too_cheap(found: Mapping[str, tuple[float, int]], unit: float) -> Iterator[str]:
    for name, (took, work) in found.items():
        if took > MOST * unit * work:
            yield f"{name}: {took / unit / max(work, 1):.1f} times"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_takes_much_longer_than_it_is_charged_for(kind: str) -> None:
    """Other processes use the same caches. So whatever seems too slow is measured again, up to five times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names = [each for each in cases() if not each[0].startswith(("math.", "operator.getitem"))]
    suspects: set[str] | None = None
    try:
        for _ in range(5):
            found = timed(kind, names)
            assert len(found) > 50, "few of the operations ran"
            slow = {text.partition(":")[0]: text for text in too_cheap(found, unit_ns())}
            suspects = set(slow) if suspects is None else suspects & set(slow)
            if not suspects:
                return
    finally:
        torch.set_num_threads(threads)
    raise AssertionError([slow[name] for name in sorted(suspects or ())])
