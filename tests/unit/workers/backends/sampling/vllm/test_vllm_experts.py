"""vLLM's own code loads our files of adapters on experts, and fills its fused-MoE buffers with the trainer's pairs.

vLLM 0.32 has kernels for these buffers on a GPU alone, so nothing here computes with them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from app.domain.ops import LoraSpec
from workers.backends.sampling.vllm import patches
from workers.models import experts, lora, peft_files
from workers.models.adapter import Adapter

_SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
_CONFIGS = {
    "Qwen3MoeForCausalLM": Qwen3MoeConfig(**_SHAPE, num_experts=4, moe_intermediate_size=24),
    "GptOssForCausalLM": GptOssConfig(**_SHAPE, num_local_experts=4),
}
_PATH = "model.layers.0.mlp.experts"
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_RANK, _MOST = 3, 8


def exported(name: str, folder: Path) -> tuple[nn.Module, Adapter]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_CONFIGS[name])
    adapter = lora.new_adapter(model, LoraSpec(rank=_RANK, train_unembed=False, seed=1, alpha=6))
    for pair in adapter.pairs.values():
        nn.init.normal_(pair.b, generator=torch.Generator().manual_seed(2))
    peft_files.write(adapter, folder, "base", model)
    return model, adapter


def vllm_layer(name: str, fused: bool) -> Any:
    """vLLM's LoRA layer for experts with its real buffers, without the base layer, whose kernels need a GPU."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import fused_moe

    class OnCpu(fused_moe.FusedMoE3DWithLoRA if fused else fused_moe.FusedMoEWithLoRA):  # type: ignore[misc]
        ep_rank, use_ep, global_num_experts = 0, False, 4

    layer = OnCpu.__new__(OnCpu)
    nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(hidden_dim=16, num_local_experts=4, intermediate_size_per_partition=24)
    layer.tp_size, layer.tp_rank, layer.device = 1, 0, torch.device("cpu")
    layer._w13_slices, layer.enable_moe_shared_loras = (1 if fused else 2), False
    config = LoRAConfig(max_lora_rank=_MOST, max_loras=2, lora_dtype=torch.float32)
    layer.create_lora_weights(2, config, SimpleNamespace(architectures=[name]))
    return layer


def read_by_vllm(folder: Path, name: str, layer: Any, fused: bool) -> Any:
    """The adapter as vLLM's manager hands it to the layer."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), 64)
    model = LoRAModel.from_local_checkpoint(
        str(folder), {*_ATTENTION, "experts"}, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )
    for weights in model.loras.values():
        weights.optimize()  # multiplies B by the scaling
    manager = SimpleNamespace(
        _get_lora_layer_weights=lambda found, path: found.get_lora(path),
        _is_3d_moe_model=True,
        model=SimpleNamespace(config=SimpleNamespace(architectures=[name])),
    )
    if fused:
        LoRAModelManager._stack_moe_lora_weights(manager, model, layer, _PATH)
    else:
        LoRAModelManager._convert_3d_to_2d_moe_lora(manager, model, layer, _PATH)
    return model


def added(adapter: Adapter, path: str, width: int, height: int) -> Tensor:
    """Returns the trainer's addition to the experts' weights: [experts, out, in]."""
    plain = SimpleNamespace(is_transposed=False)
    pair = adapter.pairs[path]
    return experts.merged(plain, torch.zeros(4, height, width), pair.a, pair.b, adapter.scaling).detach()


@pytest.mark.parametrize("fused", [True, False], ids=["gate and up together", "gate and up apart"])
@pytest.mark.parametrize("name", _CONFIGS)
def test_vllm_puts_the_trainers_pairs_into_its_buffers(name: str, fused: bool, tmp_path: Path) -> None:
    _, adapter = exported(name, tmp_path)
    layer = vllm_layer(name, fused)
    model = read_by_vllm(tmp_path, name, layer, fused)
    assert {path.rpartition(".")[2] for path in model.loras} - {"base_layer"} == {*_ATTENTION, "experts"}
    weights = model.get_lora(_PATH)
    layer.set_lora(0, weights.lora_a, weights.lora_b)

    first = [b[0] @ a[0] for a, b in zip(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, strict=True)]
    wanted = added(adapter, f"{_PATH}.base_layer", 16, 48)
    if not fused and name == "GptOssForCausalLM":  # its rows are gate and up in turn
        wanted = torch.cat([wanted[:, ::2], wanted[:, 1::2]], 1)
    torch.testing.assert_close(torch.cat(first, 1), wanted)
    second = layer.w2_lora_b_stacked[0][0] @ layer.w2_lora_a_stacked[0][0]
    torch.testing.assert_close(second, added(adapter, _PATH, 24, 16))
    assert not layer.w2_lora_b_stacked[0][1].any(), "another adapter's place is written"


def test_vllm_takes_no_kernel_that_needs_adapters_on_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our arguments may name no experts, and this kernel fails without adapters on them."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    monkeypatch.setattr(unquantized, "_trtllm_bf16_lora_supported", lambda _: True)
    patches.refuse_lora_experts()
    chosen, _ = unquantized.select_unquantized_moe_backend(SimpleNamespace(is_lora_enabled=True))
    assert chosen == unquantized.UnquantizedMoeBackend.TRITON
