"""Packs the weights of a saved model as published checkpoints do. Returns the numbers that the codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

# The numbers of FP4 (E2M1), by code: OCP Microscaling Formats (MX) Specification 1.0, table 5.
NUMBERS = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
Packed = tuple[dict[str, Tensor], Tensor]
BLOCK = 16


def mxfp4(folder: Path) -> dict[str, Tensor]:
    """GPT-OSS: stacked experts become random ones in MXFP4, two codes a byte, and a scale for each 32."""
    generator = torch.Generator().manual_seed(0)

    def pack(name: str, weight: Tensor) -> Packed:
        count, rows, columns = weight.shape
        codes = torch.randint(16, (count, columns, rows // 32, 32), generator=generator)
        scales = torch.randint(122, 128, (count, columns, rows // 32), generator=generator)
        tensors = {
            f"{name}_blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8),
            f"{name}_scales": scales.to(torch.uint8),
        }
        return tensors, (NUMBERS[codes] * 2.0 ** (scales[..., None] - 127)).reshape(count, columns, rows).mT

    return _pack(folder, ("experts.gate_up_proj", "experts.down_proj"), pack, {"quant_method": "mxfp4"})


def fp8(folder: Path) -> dict[str, Tensor]:
    """DeepSeek-V3: E4M3 codes and an fp32 scale for each block of 16 x 16 (published: 128 x 128), less at the edges."""

    def pack(name: str, weight: Tensor) -> Packed:
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        codes, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        numbers = torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                at = (slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1)))
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).to(codes.dtype)
                numbers[at] = codes[at].float() * scales[i, j]
        return {name: codes, f"{name}_scale_inv": scales}, numbers

    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    return _pack(folder, ("_proj.weight", "_with_mqa.weight"), pack, fields)


def fp8_tensor(folder: Path) -> dict[str, Tensor]:
    """Ministral 3: E4M3 codes, one bf16 scale a weight, and a scale for its activations."""

    def pack(name: str, weight: Tensor) -> Packed:
        scale = (weight.abs().max() / 448).bfloat16()
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {name: codes, f"{name}_scale_inv": scale, name.replace("weight", "activation_scale"): scale.clone()}
        return tensors, codes.float() * scale.float()

    fields = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return _pack(folder, ("_proj.weight",), pack, fields)


def int4(folder: Path) -> dict[str, Tensor]:
    """Kimi-K2-Thinking: compressed-tensors' INT4 on experts, a bf16 scale for each 32 of a row."""

    def pack(name: str, weight: Tensor) -> Packed:
        groups = weight.view(len(weight), -1, 32)
        scales = (groups.abs().amax(-1) / 7).bfloat16()
        numbers = (groups / scales[..., None]).round().clamp(-8, 7)
        stem = name.removesuffix(".weight")
        tensors = {
            f"{stem}.weight_packed": pack_to_int32(numbers.view_as(weight).to(torch.int8), 4),
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": torch.tensor(weight.shape),
        }
        return tensors, (numbers * scales[..., None].float()).view_as(weight)

    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return _pack(folder, _ROUTED, pack, _compressed("pack-quantized", args))


def nvfp4(folder: Path) -> dict[str, Tensor]:
    """compressed-tensors' NVFP4 on experts: an E4M3 scale for each 16 of a row, and an fp32 divisor of all scales."""

    def pack(name: str, weight: Tensor) -> Packed:
        groups = weight.view(len(weight), -1, 16)
        divisor = 448 * 6 / weight.abs().max()
        scales = (groups.abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
        real = scales.float() / divisor
        numbers = NUMBERS[((groups / real[..., None])[..., None] - NUMBERS).abs().argmin(-1)]
        stem = name.removesuffix(".weight")
        tensors = {
            f"{stem}.weight_packed": pack_fp4_to_uint8(numbers.view_as(weight)),
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_global_scale": divisor[None],
            f"{stem}.input_global_scale": torch.ones(1),
        }
        return tensors, (numbers * real[..., None]).view_as(weight)

    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return _pack(folder, _ROUTED, pack, _compressed("nvfp4-pack-quantized", args))


_ROUTED = tuple(f"experts.{index}.{name}_proj.weight" for index in range(4) for name in ("gate", "up", "down"))


def _compressed(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def _pack(
    folder: Path, endings: tuple[str, ...], pack: Callable[[str, Tensor], Packed], fields: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Replaces the tensors with these endings in the folder's one file, and names the format in its config.json."""
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for name in sorted(name for name in tensors if name.endswith(endings)):
        codes, numbers[name] = pack(name, tensors.pop(name))
        tensors |= codes
    assert numbers
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    return numbers
