"""A stand-in for a GPU: tensors of a device of its own, computed on the CPU, and counts of what a GPU would do.

torch's PrivateUse1 device is made known as "gpu", once and for the whole process. An operation on tensors of two
devices is an error, as on a GPU. So is a single number of the CPU, which some operations of a GPU take.

Operations of CUDA are counted as there: a grouped product is two kernels, the first of which finds the groups'
addresses, and a foreach or fused operation one for up to 64 tensors of the same strides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from triton.runtime.jit import JITFunction

from tests.budgets import flash


@dataclass(frozen=True)
class _Properties:
    total_memory: int = 80 * 10**9


class _Module(_DummyBackendModule):
    """torch.gpu, as torch.cuda is for CUDA."""

    def get_device_properties(self, device: torch.device) -> _Properties:
        return _Properties()

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return 9, 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("gpu", backend_module=_Module())
DEVICE = torch.device("gpu", 0)
_MEMORY_ALONE = ("aten.detach", "aten.empty", "aten.new_empty", "aten.alias", "aten._unsafe_view", "aten.lift_fresh")
_UNSET = ("aten.empty", "aten.new_empty")
_WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.bincount")
_FOREACH = 64


_KERNELS = {
    torch.ops.torch_attn._varlen_attn.default: flash.forward,
    torch.ops.torch_attn._varlen_attn_backward.default: flash.backward,
}


class Counts:
    """`kernels`, and `waits` of the host for the device, by operation."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()


class DeviceTensor(torch.Tensor):
    """A tensor of DEVICE around one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {}, None)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()


def _made_by(make: Callable[..., Tensor]) -> Callable[..., DeviceTensor]:
    def made(*sizes: Any, **options: Any) -> DeviceTensor:
        return DeviceTensor(make(*sizes, **{**options, "device": "cpu", "pin_memory": False}))

    return made


def _copy_from(source: Tensor, target: DeviceTensor, non_blocking: bool = False) -> DeviceTensor:
    target.held.copy_(_inner(source))
    return target


# What torch calls past a TorchDispatchMode, or in a thread without one.
_LIBRARY = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_LIBRARY.impl("empty.memory_format", _made_by(torch.empty), "PrivateUse1")  # type: ignore[no-untyped-call]
_LIBRARY.impl("empty_strided", _made_by(torch.empty_strided), "PrivateUse1")  # type: ignore[no-untyped-call]
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")  # type: ignore[no-untyped-call]
_foreach_utils._foreach_supported_types.append(DeviceTensor)  # type: ignore[arg-type]


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, self.counts)


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts the operations on DEVICE within the block."""
    counts = Counts()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=DEVICE) copies past the mode
    try:
        with _Counting(counts):
            yield counts
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _launched(kernel: JITFunction[Any], *arguments: Any, **named: Any) -> None:
    """Counts a kernel of Triton, which computes nothing here: tests/parity/test_fused.py shows what it computes."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, _Counting):
        mode.counts.kernels[kernel.fn.__name__] += 1


JITFunction.run = _launched  # type: ignore[method-assign]


def _computed(func: Any, args: Any, kwargs: Any, counts: Counts | None) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if not any(isinstance(tensor, DeviceTensor) for tensor in tensors) and target != DEVICE.type:
        return func(*args, **kwargs)
    _check_devices(func, tensors)
    if counts is not None:
        _count(func, args, kwargs, counts)
    inner_kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
    found = _KERNELS.get(func, func)(*tree_map(_inner, args), **tree_map(_inner, inner_kwargs))
    if str(func).startswith(_UNSET):
        found.zero_()  # no number of an earlier tensor may stay where a kernel of Triton would write
    if target == "cpu":
        return found
    wrapped = tree_map(lambda one: DeviceTensor(one) if type(one) is Tensor else one, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]


def _inner(leaf: Any) -> Any:
    """The leaf as a kernel takes it. Below `__torch_dispatch__` nothing else carries out a conjugate that is due."""
    return leaf.held.resolve_conj() if isinstance(leaf, DeviceTensor) else leaf


def _check_devices(func: Any, tensors: list[Tensor]) -> None:
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    foreign = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if foreign and not copies:
        raise RuntimeError(f"{func} got tensors of two devices: one of the CPU is {tuple(foreign[0].shape)}")


def _count(func: Any, args: Any, kwargs: Any, counts: Counts) -> None:
    name = str(func)
    if name.startswith(_WAITS) or _waits(func, args, kwargs):
        counts.waits[name] += 1
    returns = func._schema.returns
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    if not is_view and not name.startswith(_MEMORY_ALONE):
        counts.kernels[name] += _launches(name, args)


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """True for a copy from or to the host, unless it is a non-blocking one, for a mask, and for repeats without their
    sum."""
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is torch.ops.aten._to_copy.default:
        moves = isinstance(args[0], DeviceTensor) == (kwargs.get("device") == torch.device("cpu"))
        return moves and not kwargs.get("non_blocking")
    if func is torch.ops.aten.copy_.default:
        return not isinstance(args[1], DeviceTensor)
    masks = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
    return masks and any(isinstance(one, Tensor) and one.dtype is torch.bool for one in args[1])


def _launches(name: str, args: Any) -> int:
    if name.startswith("aten._grouped_mm"):
        return 2
    if name.startswith("aten._fused_adamw"):
        return -(-len(args[0]) // _FOREACH)
    if not name.startswith("aten._foreach"):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and isinstance(arg[0], Tensor)]
    alike = all(
        len({one.stride() for one in ones}) == 1 and ones[0].is_contiguous() for ones in zip(*lists, strict=True)
    )
    return -(-len(lists[0]) // _FOREACH) if alike else len(lists[0])
