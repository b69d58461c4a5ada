"""transformers loads an exported model and computes the same logits, for every architecture's checkpoint format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.settings import BaseModelSettings
from tests.full_disk import full_disk
from tests.hub_of_models import hub_of_models, use_hub
from tests.models import tiny_qwen3
from tests.parity import architectures
from workers.models import base_model, full_weights, lora
from workers.models.full_weights import huggingface_writer

TOKENS = torch.arange(24).view(2, 12) * 7 % 320


def loaded(folder: Path) -> base_model.LoadedBase:
    return base_model.load(BaseModelSettings(name="tiny", path=str(folder), dtype="float32"))


def moved(base: base_model.LoadedBase) -> dict[str, Tensor]:
    """Moves every parameter of the base model away from its folder's values; returns copies of them."""
    generator = torch.Generator().manual_seed(1)
    for parameter in base.model.parameters():
        parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
    return {name: parameter.clone() for name, parameter in base.model.named_parameters()}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("case", architectures.CASES)
def test_the_loaded_model_gives_the_same_logits_bit_for_bit(case: str, tmp_path: Path) -> None:
    base = loaded(architectures.build(case, tmp_path / "base"))
    tensors = moved(base)
    wanted = logits(base.model)
    lora.wrap(base.model)
    huggingface_writer(base.model, tensors, torch.float32, base.tokenizer)(tmp_path / "exported")

    # Only the folder, with the base model's attention: another kernel rounds differently.
    attention = base.model.config._attn_implementation
    (named,) = json.loads((tmp_path / "exported" / "config.json").read_text())["architectures"]
    found = getattr(transformers, named).from_pretrained(tmp_path / "exported", attn_implementation=attention)
    assert type(found) is type(base.model)
    assert torch.equal(logits(found), wanted)


def test_experts_lie_in_the_file_one_by_one(tmp_path: Path) -> None:
    base = loaded(architectures.build("qwen3-moe", tmp_path / "base"))
    huggingface_writer(base.model, moved(base), torch.float32, base.tokenizer)(tmp_path / "exported")
    names = [set(safe_open(tmp_path / f / "model.safetensors", "pt").keys()) for f in ("base", "exported")]
    assert names[0] == names[1]
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names[1]


def test_buffers_that_belong_to_a_checkpoint_come_from_the_base(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    config = transformers.DeepseekV3Config(vocab_size=320, num_attention_heads=4, **sizes, **experts)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "base")
    base = loaded(tmp_path / "base")
    bias = base.model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.copy_(torch.arange(4.0))
    huggingface_writer(base.model, moved(base), torch.float32, base.tokenizer)(tmp_path / "exported")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(found.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    assert torch.equal(logits(found), logits(base.model))


def test_the_folder_holds_the_dtype_asked_for_and_the_tokenizer(tmp_path: Path) -> None:
    base = loaded(tiny_qwen3(tmp_path / "base"))
    huggingface_writer(base.model, moved(base), torch.bfloat16, base.tokenizer)(tmp_path / "exported")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    stored = load_file(tmp_path / "exported/model.safetensors").values()
    assert {tensor.dtype for tensor in (*found.parameters(), *stored)} == {torch.bfloat16}
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert names == {path.name for path in (tmp_path / "base").iterdir()}
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("base", "exported")]
    chat = [{"role": "user", "content": "two words"}]
    one, other = (tokenizer.apply_chat_template(chat, tokenize=False) for tokenizer in tokenizers)
    assert one == other
    assert tokenizers[0](one)["input_ids"] == tokenizers[1](other)["input_ids"]


def test_a_tokenizers_further_templates_are_in_its_configuration(tmp_path: Path) -> None:
    """A checkpoint has no subfolders, and transformers reads no configured template beside one in a file."""
    source = tiny_qwen3(tmp_path / "base")
    (source / "chat_template.jinja").write_text("plain")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    base = loaded(source)
    huggingface_writer(base.model, moved(base), torch.float32, base.tokenizer)(tmp_path / "exported")
    assert all(path.is_file() for path in (tmp_path / "exported").iterdir())
    found = [AutoTokenizer.from_pretrained(folder).chat_template for folder in (source, tmp_path / "exported")]
    assert found[0] == found[1] == {"default": "plain", "tool_use": "tools"}


def test_a_tied_head_given_values_of_its_own_is_written_untied(tmp_path: Path) -> None:
    base = loaded(tiny_qwen3(tmp_path / "base"))
    tensors = moved(base)
    head = tensors["model.embed_tokens.weight"] * 2
    wanted = 2 * logits(base.model)
    huggingface_writer(base.model, tensors | {"lm_head.weight": head}, torch.float32, base.tokenizer)(
        tmp_path / "exported"
    )
    assert json.loads((tmp_path / "exported/config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), wanted)
    assert base.model.config.tie_word_embeddings


def test_a_large_model_lies_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = loaded(tiny_qwen3(tmp_path / "base"))
    monkeypatch.setattr(full_weights, "_SHARD", "100KB")
    huggingface_writer(base.model, moved(base), torch.float32, base.tokenizer)(tmp_path / "exported")
    assert len([*(tmp_path / "exported").glob("model-*.safetensors")]) > 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), logits(base.model))


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_parameter_missing_or_unknown_is_refused_by_name(change: str, tmp_path: Path) -> None:
    base = loaded(tiny_qwen3(tmp_path / "base"))
    tensors = moved(base)
    if change == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.bias"] = torch.zeros(64)
    with pytest.raises(ValueError, match=r"model\.norm"):
        huggingface_writer(base.model, tensors, torch.float32, base.tokenizer)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    base = loaded(tiny_qwen3(tmp_path / "base"))
    write = huggingface_writer(base.model, moved(base), torch.float32, base.tokenizer)
    with full_disk(4096), pytest.raises(OSError):
        write(tmp_path / "exported")


def test_a_tokenizer_of_the_hub_comes_from_its_cache_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded(tiny_qwen3(tmp_path / "base"))
    cached = tmp_path / "hub/models--some--base"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(tmp_path / "base/tokenizer.json", cached / "snapshots" / ("0" * 40))
    with hub_of_models() as hub:
        hub.repos["some/base"] = tmp_path / "base"
        use_hub(monkeypatch, hub.url, tmp_path / "hub")
        huggingface_writer(base.model, moved(base), torch.float32, "some/base")(tmp_path / "exported")
    assert hub.asked == []
    assert (tmp_path / "exported/tokenizer.json").read_bytes() == (tmp_path / "base/tokenizer.json").read_bytes()
    assert not (tmp_path / "exported/tokenizer_config.json").exists()
