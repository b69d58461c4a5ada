"""Quantised weights: their numbers, which weights they are, and when they are dequantised."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import _grouped_linear

from app.errors import SetupError, UnservableModel
from app.settings import BaseModelSettings, TrainerSettings
from tests import packed_checkpoints
from tests.parity import architectures
from workers.models import base_model, experts, quantized
from workers.models.quantized import QuantizedLinear, QuantizedWeight, for_product

KINDS = ("nf4", "int8", "fp8")
# QLoRA (arXiv 2305.14314), appendix E, to four digits.
NF4 = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0)
NF4 += (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1)
NUMBERS = {
    "nf4": torch.tensor(NF4),
    "int8": torch.arange(-127, 128) / 127,
    "fp8": (every := torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())[every.isfinite()] / 448,
}


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


def loaded(folder: Path, kind: str) -> base_model.LoadedBase:
    return base_model.load(BaseModelSettings(name="tiny", path=str(folder), dtype=kind))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 64), (4, 48, 24), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_the_nearest_of_its_kind_times_the_greatest_of_its_64(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = random(*shape).to(dtype)
    weight.view(-1)[:20] = 0
    found = QuantizedWeight(weight, kind).dequantized()
    assert found.shape == weight.shape and found.dtype is dtype
    blocks = [block.float() for block in weight.flatten().split(64)]
    for block, got in zip(blocks, found.flatten().split(64), strict=True):
        scaled = block / block.abs().max()
        nearest = (scaled[:, None] - NUMBERS[kind]).abs().amin(1)
        rounding = 1e-3 if dtype is torch.float32 else 1e-2
        assert ((got.float() / block.abs().max() - scaled).abs() <= nearest + rounding).all()


def test_a_block_of_zeros_stays_zero() -> None:
    for kind in KINDS:
        assert not QuantizedWeight(torch.zeros(2, 64), kind).dequantized().any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weight_has_the_same_bits_on_any_number_of_threads(kind: str) -> None:
    weight, threads = random(512, 512), torch.get_num_threads()
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        made = QuantizedWeight(weight, kind)
        results.append((made.codes, made.scales, made.dequantized()))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_a_4_bit_number_takes_4_and_a_half_bits_and_the_others_8_and_a_half() -> None:
    for kind, bits in (("nf4", 4.5), ("int8", 8.5), ("fp8", 8.5)):
        made = QuantizedWeight(random(256, 256), kind)
        assert 8 * (made.codes.nbytes + made.scales.nbytes) == bits * 256 * 256


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Every dequantised tensor, while it lives."""
    made: list[weakref.ref[Tensor]] = []
    make = QuantizedWeight.dequantized

    def noted(weight: QuantizedWeight) -> Tensor:
        tensor = make(weight)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(QuantizedWeight, "dequantized", noted)
    return made


def test_autograd_keeps_a_linears_codes_and_not_the_dequantised_tensor(dequantized: list[weakref.ref[Tensor]]) -> None:
    linear = nn.Linear(64, 32).requires_grad_(False)
    made = QuantizedLinear(linear, QuantizedWeight(linear.weight, "nf4"))
    x = random(3, 64).requires_grad_()
    out = made(x)
    assert [tensor() for tensor in dequantized] == [None]
    out.backward(random(3, 32))
    assert [tensor() for tensor in dequantized] == [None, None]
    wanted = made.weight.dequantized()
    assert torch.equal(out, nn.functional.linear(x, wanted, linear.bias))
    assert torch.equal(x.grad, random(3, 32) @ wanted)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_autograd_keeps_the_codes_of_experts(is_transposed: bool, dequantized: list[weakref.ref[Tensor]]) -> None:
    weight = QuantizedWeight(random(4, 32, 64), "int8")
    x = random(10, 32 if is_transposed else 64).requires_grad_()
    ends = torch.tensor([3, 5, 5, 10], dtype=torch.int32)
    with for_product(weight) as plain:
        out = _grouped_linear(x, plain, ends, None, is_transposed)
    del plain
    assert [tensor() for tensor in dequantized] == [None]
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out))
    again = _grouped_linear(x, weight.dequantized(), ends, None, is_transposed)
    assert torch.equal(found, torch.autograd.grad(again, x, torch.ones_like(out))[0])


@pytest.mark.parametrize("case", ["llama, tied head", "qwen3.5-moe, vision", "deepseek-v3"])
def test_only_linears_and_experts_that_adapters_cover_are_quantised(case: str, tmp_path: Path) -> None:
    """The head, embeddings, norms, routers, convolutions and the vision tower stay as they are."""
    architectures.build(case, tmp_path)
    plain = dict(loaded(tmp_path, "float32").model.named_parameters(remove_duplicate=False))
    model = loaded(tmp_path, "nf4").model
    kept = dict(model.named_parameters(remove_duplicate=False))
    made = {name for name, weight in quantized.weights(model) if isinstance(weight, QuantizedWeight)}
    leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in made}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    attention |= {"out_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    assert leaves <= attention | {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}
    assert not any("visual" in name for name in made)
    assert kept.keys() | made == plain.keys() and not kept.keys() & made
    assert all(torch.equal(kept[name], plain[name]) for name in kept)
    assert sum(plain[name].numel() for name in made) > sum(p.numel() for name, p in kept.items() if "layers" in name)


def test_plain_weights_are_dropped_one_by_one_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architectures.build("qwen3-moe", tmp_path)
    read: list[weakref.ref[Tensor]] = []
    install = quantized.install

    def noted(model: nn.Module, name: str, tensor: Tensor, kind: str) -> None:
        assert all(earlier() is None for earlier in read)
        read.append(weakref.ref(tensor))
        install(model, name, tensor, kind)

    monkeypatch.setattr(quantized, "install", noted)
    base = loaded(tmp_path, "nf4")
    assert len(read) == 12
    assert base.info.dtype == "nf4" and base.dtype is torch.float32
    assert not hasattr(base.model.config, "quantization_config"), "a merged model is saved as plain tensors"


def test_packed_experts_are_quantised_from_the_numbers_of_their_format(tmp_path: Path) -> None:
    expected = packed_checkpoints.mxfp4(architectures.build("gpt-oss", tmp_path))
    found = dict(quantized.weights(loaded(tmp_path, "int8").model))
    for name, weight in expected.items():
        assert torch.equal(found[name].codes, QuantizedWeight(weight, "int8").codes)


def test_a_model_whose_experts_would_stay_as_they_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = architectures.build("llama4", tmp_path)
    settings = BaseModelSettings(name="odd", path=str(folder), dtype="nf4")
    monkeypatch.setattr(experts, "names", lambda _: ())
    with pytest.raises(UnservableModel, match="cannot have dtype 'nf4': its experts, which are most of its weights"):
        base_model.check_adaptable(settings)
    base_model.check_adaptable(settings.model_copy(update={"dtype": "auto"}))


def test_a_worker_checks_the_settings_beside_a_quantised_base_itself(tmp_path: Path) -> None:
    settings = BaseModelSettings(name="tiny", path=str(tmp_path), dtype="nf4", trainer=TrainerSettings(zero_stage=3))
    with pytest.raises(SetupError, match=r"does not go with trainer\.zero_stage = 3"):
        base_model.load(settings)


@pytest.fixture
def fresh_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a stand-in for bitsandbytes, as if it had not been imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    quantized._operators.cache_clear()
    folder = tmp_path / "bitsandbytes"
    folder.mkdir()
    yield folder
    quantized._operators.cache_clear()


def test_a_library_that_cannot_be_imported_is_named_with_the_remedy(fresh_library: Path) -> None:
    (fresh_library / "__init__.py").write_text("import no_such_module")
    with pytest.raises(SetupError, match=r"needs bitsandbytes.*no_such_module.*pip install 'tinsmith\[train\]'"):
        QuantizedWeight(torch.zeros(64), "nf4")


def test_the_library_downloads_no_kernel(fresh_library: Path) -> None:
    (fresh_library.parent / "kernels.py").write_text("raise AssertionError('this would load a downloaded kernel')")
    (fresh_library / "__init__.py").write_text("try:\n    import kernels\nexcept ImportError:\n    pass\n")
    quantized._operators()
    assert "kernels" not in sys.modules
