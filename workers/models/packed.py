"""Reads base models that are published in 4 or 8 bits as plain tensors: FP8 (DeepSeek-V3), MXFP4 (GPT-OSS), and INT4
and NVFP4 of compressed-tensors (Kimi-K2).

A tensor is unpacked when transformers asks for it, so the packed and the plain model are never both in memory. The
numbers are computed in fp32 and rounded once, to the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from app.domain.records import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from app.errors import UnservableModel

_KEY = "quantization_config"
# The numbers of FP4 (E2M1) by code: OCP Microscaling Formats (MX) Specification 1.0, table 5.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# No plain weight has one of these dtypes.
_CODES = ("F8_", "U8", "I8", "I32")


@dataclass(frozen=True, slots=True)
class Format:
    """A weight's tensors have the names `stem + codes` and `stem + part`; the plain weight's is `stem + plain`.

    `unpack(codes, *parts)` returns the plain weight in fp32. Tensors with a suffix of `unused` serve quantised
    activations. `exact_in_vllm`: vLLM reads the format itself and leaves activations as they are.
    """

    codes: str
    parts: Sequence[str]
    plain: str
    unpack: Callable[..., Tensor]
    unused: tuple[str, ...] = ()
    exact_in_vllm: bool = False


def format_of(config: Any, name: str) -> Format | None:
    """Returns the format of the base model's weights, or None for plain ones. `name` is for the error.

    Raises UnservableModel for a format that is not read.
    """
    given = getattr(config, _KEY, None) or getattr(config.get_text_config(), _KEY, None)
    if not given:
        return None
    found = _format(given)
    if found is None:
        kind = " ".join(str(given[key]) for key in ("quant_method", "quant_algo", "format") if given.get(key))
        raise _unread(name, kind or "unknown")
    return found


def _format(given: Mapping[str, Any]) -> Format | None:
    method = given.get("quant_method")
    if method == "mxfp4":
        return Format("_blocks", ("_scales",), "", _mxfp4, exact_in_vllm=True)
    if method == "fp8":
        block = given.get("weight_block_size")
        unpack = partial(_fp8, block=None if block is None else tuple(block))
        return Format(".weight", (".weight_scale_inv",), ".weight", unpack, (".activation_scale",))
    weights = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
    kinds = {(one.get("type"), one.get("num_bits"), one.get("symmetric", True)) for one in weights}
    if method == "compressed-tensors" and given.get("format") == "pack-quantized" and kinds == {("int", 4, True)}:
        return Format(".weight_packed", (".weight_scale", ".weight_shape"), ".weight", _int4)
    if method == "compressed-tensors" and given.get("format") == "nvfp4-pack-quantized":
        parts = (".weight_scale", ".weight_global_scale")
        return Format(".weight_packed", parts, ".weight", _nvfp4, (".input_global_scale",))
    return None


def forget(config: Any) -> None:
    """Removes the format from the configuration of a model that now has plain tensors."""
    for one in (config, config.get_text_config()):
        if hasattr(one, _KEY):
            delattr(one, _KEY)


class _Lazy:
    """A tensor as transformers reads it: `tensor[...]`."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> Tensor:
        return self._read()


def tensors(source: str, form: Format, name: str) -> dict[str, Any]:
    """Returns the checkpoint's tensors under their plain names, for `state_dict` of from_pretrained.

    `source` is a folder or a hub id. Raises OSError when files are missing, and UnservableModel when codes are left
    over that `form` does not explain.
    """
    reads: dict[str, Callable[[], Tensor]] = {}
    dtypes: dict[str, str] = {}
    for file in _files(source):
        opened: Any = safe_open(file, "pt")
        for key in opened.keys():  # noqa: SIM118 - a handle of safetensors is no dict
            reads[key] = partial(opened.get_tensor, key)
            dtypes[key] = opened.get_slice(key).get_dtype()
    found: dict[str, Any] = {}
    explained = {key for key in reads if key.endswith(form.unused)}
    for key in sorted(reads):
        stem = key.removesuffix(form.codes)
        names = [key, *(stem + part for part in form.parts)]
        if stem != key and all(one in reads for one in names):
            found[stem + form.plain] = _Lazy(partial(_unpacked, form, [reads[one] for one in names]))
            explained.update(names)
    rest = reads.keys() - explained
    if strange := sorted(key for key in rest if dtypes[key].startswith(_CODES)):
        raise _unread(name, f"{strange[0]} and {len(strange) - 1} more tensors")
    return found | {key: _Lazy(reads[key]) for key in rest}


def _unpacked(form: Format, reads: Sequence[Callable[[], Tensor]]) -> Tensor:
    return form.unpack(*(read() for read in reads))


def _files(source: str) -> Sequence[str]:
    whole = cached_file(source, WEIGHTS_FILE, _raise_exceptions_for_missing_entries=False)
    if whole is not None:
        return [whole]
    index = cached_file(source, WEIGHTS_INDEX_FILE)
    return list(get_checkpoint_shard_files(source, index)[0])


def _fp8(codes: Tensor, scales: Tensor, *, block: tuple[int, int] | None) -> Tensor:
    """[rows, columns], and a scale for each block of this size, those at the edges being smaller; or one for all."""
    if block is not None:
        for axis, size in enumerate(block):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, codes.shape[axis])
    return codes.float() * scales.float()


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks uint8 [experts, outputs, blocks, 16] and exponents uint8 [experts, outputs, blocks]: [experts, inputs,
    outputs]. They are contiguous, because DeepSpeed views parameters as bytes."""
    return (_fp4(blocks) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).mT.contiguous()


def _nvfp4(codes: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    """Codes uint8 [rows, columns / 2], scales fp8 [rows, groups]; all are divided by `divisor`."""
    return _grouped(_fp4(codes), scales.float() / divisor.float())


def _int4(words: Tensor, scales: Tensor, shape: Tensor) -> Tensor:
    """Words int32 [rows, columns / 8] with the first column in the lowest bits, scales [rows, groups]. Code 8 is 0."""
    rows, columns = shape.tolist()
    codes = words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    return _grouped((codes.flatten(-2)[:, :columns] - 8).float().view(rows, columns), scales.float())


def _fp4(codes: Tensor) -> Tensor:
    """Two numbers a byte, the first in the low bits: the last axis is twice as long."""
    numbers = torch.tensor(_FP4)
    return torch.stack((numbers[(codes & 15).int()], numbers[(codes >> 4).int()]), -1).flatten(-2)


def _grouped(numbers: Tensor, scales: Tensor) -> Tensor:
    """Scales each row in groups of equal length."""
    rows, groups = scales.shape
    return (numbers.view(rows, groups, -1) * scales[..., None]).view(rows, -1)


def _unread(name: str, kind: str) -> UnservableModel:
    return UnservableModel(
        f"base model {name!r} is published with packed weights that Tinsmith does not read ({kind}): give a bf16 copy "
        "of it, or one in FP8 (quant_method fp8), MXFP4, or compressed-tensors' INT4 or NVFP4"
    )
