"""GPT-OSS as it is published: its experts in MXFP4, which is unpacked when the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.models import base_model

# The numbers of FP4 (E2M1), by code: OCP Microscaling Formats (MX) Specification 1.0, table 5.
NUMBERS = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_are_unpacked_to_the_numbers_of_the_format(dtype: str, tmp_path: Path) -> None:
    expected = pack_experts(architectures.build("gpt-oss", tmp_path))
    model = base_model.load(BaseModelSettings(name="packed", path=str(tmp_path), dtype=dtype)).model
    found = dict(model.named_parameters())
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.to(model.dtype))
    assert str(model.dtype) == f"torch.{dtype}"
    assert not hasattr(model.config, "quantization_config"), "a merged model is saved as plain tensors"


def pack_experts(folder: Path) -> dict[str, Tensor]:
    """Replaces the experts in `folder` by random ones in MXFP4: two codes a byte, and a scale for each 32.

    Returns their numbers."""
    tensors, numbers, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        count, rows, columns = tensors.pop(name).shape
        codes = torch.randint(16, (count, columns, rows // 32, 32), generator=generator)
        scales = torch.randint(122, 128, (count, columns, rows // 32), generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        numbers[name] = (NUMBERS[codes] * 2.0 ** (scales[..., None] - 127)).reshape(count, columns, rows).mT
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return numbers
