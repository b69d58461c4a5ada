from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from app.domain.ops import LoraSpec
from app.errors import UserOpError
from workers.backends.training.base import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from workers.models import lora, peft_files
from workers.models.adapter import Adapter


class Tiny(nn.Module):
    """Two linear layers that can have an adapter, and one that cannot; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(hidden_size=6, num_attention_heads=1)
        self.embed = nn.Embedding(11, 6)
        self.q_proj = nn.Linear(6, 6, bias=False)
        self.other = nn.Linear(6, 6, bias=False)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.other(self.q_proj(self.embed(tokens))))


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    model = Tiny().requires_grad_(False)
    lora.wrap(model)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.arange(20).view(5, 4) % 11


def trained(model: nn.Module, spec: LoraSpec) -> Adapter:
    adapter = lora.new_adapter(model, spec)
    generator = torch.Generator().manual_seed(spec.seed)
    for pair in adapter.pairs.values():
        nn.init.normal_(pair.b, generator=generator)
    return adapter


def by_hand(model: Tiny, adapter: Adapter | None, tokens: torch.Tensor) -> torch.Tensor:
    def weight(path: str, linear: nn.Module) -> torch.Tensor:
        base = getattr(linear, "base", linear).weight
        if adapter is None or path not in adapter.pairs:
            return base
        pair = adapter.pairs[path]
        return base + adapter.spec.alpha / adapter.spec.rank * pair.b @ pair.a

    x = model.embed(tokens)
    for path in ("q_proj", "other", "lm_head"):
        x = x @ weight(path, getattr(model, path)).t()
    return x


def test_targets_are_the_same_before_and_after_wrapping() -> None:
    model = Tiny()
    wanted = {"attn": ["q_proj"], "mlp": [], "unembed": ["lm_head"]}
    assert lora.targets(model) == wanted
    lora.wrap(model)
    lora.wrap(model)
    assert lora.targets(model) == wanted
    assert isinstance(model.q_proj.base, nn.Linear)


def test_one_adapter_adds_its_scaled_product(model: Tiny, tokens: torch.Tensor) -> None:
    adapter = trained(model, LoraSpec(rank=3, seed=1, alpha=12.0))
    with lora.use([(adapter, len(tokens))]):
        found = model(tokens)
    torch.testing.assert_close(found, by_hand(model, adapter, tokens))
    torch.testing.assert_close(model(tokens), by_hand(model, None, tokens))


def test_each_row_of_a_batch_has_its_own_adapter(model: Tiny, tokens: torch.Tensor) -> None:
    one, two = trained(model, LoraSpec(rank=3, seed=1)), trained(model, LoraSpec(rank=5, seed=2, train_attn=False))
    with lora.use([(one, 2), (None, 1), (two, 2)]):
        found = model(tokens)
    for adapter, rows in ((one, slice(0, 2)), (None, slice(2, 3)), (two, slice(3, 5))):
        torch.testing.assert_close(found[rows], by_hand(model, adapter, tokens[rows]))


def test_where_nothing_is_learnt_the_sums_are_the_same(model: Tiny, tokens: torch.Tensor) -> None:
    """Adjacent segments: two adapters of the same rank, none, and one of another rank."""
    adapters = [trained(model, LoraSpec(rank=rank, seed=seed)) for seed, rank in enumerate((4, 4, 2))]
    segments = [(adapters[0], 1), (adapters[1], 1), (None, 1), (adapters[2], 1)]
    rows = tokens[:1].expand(4, -1)
    with lora.use(segments):
        learnt = model(rows)
        with torch.inference_mode():
            inferred = model(rows)
    torch.testing.assert_close(inferred, learnt)


def test_rows_of_one_adapter_give_no_gradient_to_another(model: Tiny, tokens: torch.Tensor) -> None:
    one, two = trained(model, LoraSpec(rank=3, seed=1)), trained(model, LoraSpec(rank=3, seed=2))
    with lora.use([(one, 2), (two, 3)]):
        model(tokens)[:2].square().sum().backward()
    assert all(pair.a.grad.abs().sum() > 0 for pair in one.pairs.values())
    assert all(pair.a.grad.abs().sum() == 0 for pair in two.pairs.values())


def test_neighbours_of_one_shape_share_a_product_and_nothing_else(model: Tiny, tokens: torch.Tensor) -> None:
    one, two, three = (trained(model, LoraSpec(rank=3, seed=seed)) for seed in (1, 2, 3))
    scaled = trained(model, LoraSpec(rank=3, seed=4, alpha=12.0))
    segments = [(one, 1), (two, 1), (three, 2), (scaled, 1)]
    rows = torch.arange(5)[:, None, None] + 1.0
    with lora.use(segments):
        found = model(tokens)
    (found * rows).sum().backward()
    gradients = {adapter: [p.grad for p in adapter.tensors.values()] for adapter, _ in segments}
    start = 0
    for adapter, count in segments:
        mine = slice(start, start + count)
        start += count
        for parameter in adapter.tensors.values():
            parameter.grad = None
        wanted = by_hand(model, adapter, tokens[mine])
        assert_close(found[mine], wanted)
        (wanted * rows[mine]).sum().backward()
        for gradient, parameter in zip(gradients[adapter], adapter.tensors.values(), strict=True):
            assert_close(gradient, parameter.grad)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compares element by element. The bound is relative to the tensor's greatest value, because sums may cancel in an
    element."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


def test_threads_do_not_see_each_others_adapters(model: Tiny, tokens: torch.Tensor) -> None:
    adapter, found = trained(model, LoraSpec(rank=3, seed=1)), []
    with lora.use([(adapter, len(tokens))]):
        thread = threading.Thread(target=lambda: found.append(model(tokens)))
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], by_hand(model, None, tokens))


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_alone(model: Tiny, tokens: torch.Tensor) -> None:
    torch.manual_seed(1)
    one = lora.new_adapter(model, LoraSpec(rank=3, seed=5))
    torch.manual_seed(2)
    same, other = (lora.new_adapter(model, LoraSpec(rank=3, seed=seed)) for seed in (5, 6))
    with lora.use([(one, len(tokens))]):
        assert torch.equal(model(tokens), by_hand(model, None, tokens))
    assert torch.equal(one.pairs["q_proj"].a, same.pairs["q_proj"].a)
    assert not torch.equal(one.pairs["q_proj"].a, other.pairs["q_proj"].a)
    assert one.pairs["q_proj"].a.abs().max() <= 1 / 6**0.5  # kaiming_uniform(a=sqrt 5) is U(-1/sqrt(in), 1/sqrt(in))


def test_masters_are_fp32_under_a_bfloat16_base(model: Tiny, tokens: torch.Tensor) -> None:
    model.to(torch.bfloat16)
    adapter = trained(model, LoraSpec(rank=3, seed=1))
    with lora.use([(adapter, len(tokens))]):
        out = model(tokens)
    out.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert {p.dtype for p in adapter.tensors.values()} == {p.grad.dtype for p in adapter.tensors.values()}
    assert adapter.pairs["q_proj"].a.grad.dtype is torch.float32


def test_peft_files_give_the_same_adapter_back(model: Tiny, tmp_path: Path) -> None:
    adapter = trained(model, LoraSpec(rank=3, seed=1, alpha=9.5, train_mlp=False))
    peft_files.write(adapter, tmp_path, "some/base")
    found = peft_files.read(tmp_path)
    assert found.spec == LoraSpec(rank=3, train_mlp=False, alpha=9.5)
    assert all(torch.equal(found.tensors[name], p) for name, p in adapter.tensors.items())
    assert "base_model.model.lm_head.lora_A.weight" in load_file(tmp_path / ADAPTER_FILE)
    lora.check_fits(found, model)


def test_a_critic_is_a_classifier_of_one_label_in_peft_files(model: Tiny, tmp_path: Path) -> None:
    critic = lora.new_adapter(model, LoraSpec(rank=3, seed=1), critic=True)
    assert critic.value_head is not None
    assert (list(critic.pairs), critic.spec.train_unembed) == (["q_proj"], False)
    peft_files.write(critic, tmp_path, "some/base")
    config = json.loads((tmp_path / ADAPTER_CONFIG_FILE).read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    found = peft_files.read(tmp_path)
    assert found.value_head is not None
    assert torch.equal(found.value_head, critic.value_head)
    assert list(found.tensors) == list(critic.tensors)
    lora.check_fits(found, model)
    lora.check_role(found, critic=True)


@pytest.mark.parametrize("shape", [(2, 6), (1, 4)])
def test_a_value_head_of_another_size_does_not_fit(model: Tiny, shape: tuple[int, int]) -> None:
    critic = lora.new_adapter(model, LoraSpec(rank=3), critic=True)
    with pytest.raises(UserOpError, match=rf"\[{shape[0]}, {shape[1]}\], but this base model needs \[1, 6\]"):
        lora.check_fits(Adapter(critic.spec, critic.pairs, nn.Parameter(torch.zeros(shape))), model)


DAMAGES = (
    *("no folder", "no json", "other rank", "other rank of B", "unknown tensor", "half a pair", "truncated"),
    *("no score", "a score"),
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_no_plain_adapter_are_refused(model: Tiny, tmp_path: Path, damage: str) -> None:
    peft_files.write(trained(model, LoraSpec(rank=3)), tmp_path, "some/base")
    config, weights = tmp_path / ADAPTER_CONFIG_FILE, tmp_path / ADAPTER_FILE
    tensors = load_file(weights)
    if damage == "no folder":
        tmp_path = tmp_path / "missing"
    elif damage == "no json":
        config.write_text("{")
    elif damage == "other rank":
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 4}))
    elif damage == "other rank of B":
        save_file({name: t[:, :2].contiguous() if "lora_B" in name else t for name, t in tensors.items()}, weights)
    elif damage == "no score":
        config.write_text(json.dumps({**json.loads(config.read_text()), "modules_to_save": ["score"]}))
    elif damage == "a score":
        save_file({**tensors, "base_model.model.score.weight": torch.zeros(1, 6)}, weights)
    elif damage == "unknown tensor":
        save_file({**tensors, "base_model.model.embed.lora_embedding_A": torch.zeros(1)}, weights)
    elif damage == "half a pair":
        save_file({name: t for name, t in tensors.items() if "lora_A" in name}, weights)
    else:
        weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserOpError):
        peft_files.read(tmp_path)


def test_an_adapter_of_another_base_does_not_fit(model: Tiny) -> None:
    adapter = lora.new_adapter(model, LoraSpec(rank=3))
    with pytest.raises(UserOpError, match="q_proj"):
        lora.check_fits(Adapter(LoraSpec(rank=3), {"lm_head": adapter.pairs["lm_head"]}), model)


def test_an_adapter_of_a_deeper_base_does_not_fit(model: Tiny) -> None:
    """The pairs of its further layers would be left out in silence."""
    adapter = lora.new_adapter(model, LoraSpec(rank=3))
    deeper = {**adapter.pairs, "layers.1.q_proj": adapter.pairs["q_proj"]}
    with pytest.raises(UserOpError, match=r"layers\.1\.q_proj .* None in the model"):
        lora.check_fits(Adapter(LoraSpec(rank=3), deeper), model)


def test_an_adapter_read_from_files_has_the_order_of_a_fresh_one(model: Tiny, tmp_path: Path):
    """The gradient norm is summed in that order, so clipping would differ in its last bit after a restore."""
    fresh = lora.new_adapter(model, LoraSpec(rank=4))
    peft_files.write(fresh, tmp_path, "base")
    assert list(peft_files.read(tmp_path).tensors) == list(fresh.tensors)
