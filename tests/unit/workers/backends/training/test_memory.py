"""The choice of what layers keep, and its effect: results of the same bits from less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, OPTConfig

from app.domain.ops import ForwardBackward, LoraSpec
from app.errors import SetupError
from app.settings import BaseModelSettings
from tests.models import byte_tokenizer, tiny_qwen3
from tests.parity.architectures import build
from tests.parity.datums import batch, supervised
from tests.parity.test_memory import kept_bytes
from workers.backends.training import backends, memory
from workers.backends.training.base import Create
from workers.backends.training.memory import Activations, Footprint, Kept, choose
from workers.backends.training.trainer import Trainer

# 10 layers of 100 bytes a token, with inputs of 10.
FOOTPRINT = Footprint(whole=1000, inputs=100, layers=10)
SHORT, LONG = (9, 30, 4), (9, 400)
_OPT = {"vocab_size": 20, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(
    ("tokens", "free", "host", "wanted"),
    [
        (60, 100_000, True, Kept.ALL),
        (61, 100_000, True, Kept.INPUTS),
        (300, 100_000, True, Kept.INPUTS),
        (301, 100_000, True, Kept.INPUTS_ON_HOST),
        (301, 100_000, False, Kept.INPUTS),
        (1, 0, True, Kept.INPUTS_ON_HOST),
        (10**9, 100_000, False, Kept.INPUTS),
    ],
)
def test_the_choice_keeps_as_much_as_six_tenths_of_the_free_memory_hold(
    tokens: int, free: int, host: bool, wanted: Kept
) -> None:
    assert choose(tokens, FOOTPRINT, free, host=host) == wanted


@pytest.mark.parametrize(
    ("free", "setting", "wanted"),
    [
        (100_000_000, "auto", 8192),
        (10_000_000, "auto", 5120),  # 6,000 fit
        (3_000_000, "auto", 8192),  # 1,800 fit, and 9,000 when layers are computed again
        (1_000_000, "auto", 2048),
        (3_000_000, False, 1024),
        (10_000_000, True, 8192),
        (0, "auto", 1024),
    ],
)
def test_a_gpus_micro_batch_is_as_large_as_its_memory_allows(free: int, setting: bool | str, wanted: int) -> None:
    assert memory.micro_batch_tokens(FOOTPRINT, free, setting) == wanted


def test_a_cpus_micro_batch_does_not_depend_on_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**50)
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), trainer={"backend": "torch"}))
    backend.open()
    assert backend.describe()["micro_batch_tokens"] == 1024


def test_full_fine_tuning_leaves_a_gpus_memory_to_gradients_and_optimizer_state(base: Path) -> None:
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), trainer={"backend": "torch"}), full=True)
    backend.open()
    assert backend._engine.hidden_states.micro_batch_tokens(torch.device("cuda")) == 1024


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


def opened(base: Path, setting: bool | str) -> Trainer:
    torch.set_num_threads(1)
    trainer = {"backend": "torch", "activation_checkpointing": setting, "micro_batch_tokens": 64}
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer))
    backend.open()
    backend.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    return backend


def results(backend: Trainer) -> dict[str, bytes]:
    """Two passes, of short datums and of a long one beside a short one: the logprobs and the gradients, as bytes."""
    found = {}
    for turn, lengths in enumerate((SHORT, LONG)):
        output = backend.apply({"m": ForwardBackward(batch(supervised(turn, lengths)), "cross_entropy")})["m"]
        found[f"{turn}"] = output.logprobs.values.tobytes()
    return found | {name: gradient.tobytes() for name, gradient in backend.gradients("m").items()}


def computed_again(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """The choices of all later passes."""
    found: list[Kept] = []

    def noted(*args: object, **settings: bool) -> Kept:
        found.append(choose(*args, **settings))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(memory, "choose", noted)
    return found


def test_only_a_pass_that_does_not_fit_is_computed_again_and_all_bits_are_the_same(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = results(opened(base, False))
    assert results(opened(base, True)) == wanted
    chosen, layers = computed_again(monkeypatch), []
    again = memory._recomputed
    monkeypatch.setattr(memory, "_recomputed", lambda run, *given: layers.append(run) or again(run, *given))
    assert results(opened(base, "auto")) == wanted
    assert (chosen, layers) == ([Kept.ALL] * 3, [])
    # The activations of some 100 to 300 tokens of this model fit.
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**21)
    chosen.clear()
    assert results(opened(base, "auto")) == wanted
    assert chosen == [Kept.ALL, Kept.INPUTS, Kept.ALL]
    assert len(layers) == 2  # the model's layers, in one pass


def test_inputs_that_lie_in_host_memory_change_no_bit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = results(opened(base, False))
    moved = []
    packed = torch.autograd.graph.save_on_cpu

    def counted(**settings: bool) -> object:
        moved.append(settings)
        return packed(**settings)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counted)
    monkeypatch.setattr(memory, "choose", lambda *_, **__: Kept.INPUTS_ON_HOST)
    assert results(opened(base, "auto")) == wanted
    assert len(moved) == 3


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3.5", "deepseek-v3", "nemotron-h"])
@pytest.mark.parametrize("lengths", [[1500], [100 + 37 * datum for datum in range(12)]], ids=["long", "uneven"])
def test_a_pass_keeps_as_many_bytes_a_token_as_two_small_passes_said(
    family: str, lengths: list[int], tmp_path: Path
) -> None:
    """With an adapter on every linear. Six tenths of the memory are used, which is room for 1.6 times as many."""
    torch.set_num_threads(1)
    trainer = {"backend": "torch", "micro_batch_tokens": sum(lengths)}
    path = build(family, tmp_path / "base", hidden_size=128)
    byte_tokenizer().save_pretrained(path)
    backend = backends.create(BaseModelSettings(name="tiny", path=str(path), dtype="float32", trainer=trainer))
    backend.open()
    backend.apply({"m": Create(LoraSpec(rank=16, seed=1))})
    op = {"m": ForwardBackward(batch(supervised(0, lengths)), "cross_entropy")}
    backend.apply(op)
    footprint = backend._engine.hidden_states._activations._footprint
    assert footprint is not None
    with kept_bytes() as kept:
        backend.apply(op)
    weights = sum(parameter.untyped_storage().nbytes() for parameter in backend._engine.base.model.parameters())
    assert sum(kept) - weights == pytest.approx(sum(lengths) * footprint.whole, rel=0.2)


def test_a_measurement_keeps_no_weight_in_memory() -> None:
    weight, x = torch.ones(8, 8), torch.ones(2, 8, requires_grad=True)
    with memory._kept_bytes() as found:
        y = x @ weight
        kept = StorageWeakRef(weight.untyped_storage())
        weight.data = torch.empty(0)  # as ZeRO-3 frees a layer's weights after its forward
        assert kept.expired()
    assert y.requires_grad
    assert sum(found.values()) == 8 * 8 * 4


def test_a_layer_that_calls_dropout_by_itself_has_none() -> None:
    model = AutoModelForCausalLM.from_config(OPTConfig(**_OPT))
    (layer,) = model.model.decoder.layers
    assert layer.dropout > 0
    Activations(model, True)
    assert layer.dropout == 0


def test_a_model_without_such_layers_runs_with_auto_and_is_refused_with_true() -> None:
    model = torch.nn.Module()
    model.config = type("Config", (), {"get_text_config": lambda self: self})()  # type: ignore[assignment]
    Activations(model, "auto").during(1, torch.device("cpu"), print)
    with pytest.raises(SetupError, match=r"Module does not support trainer\.activation_checkpointing"):
        Activations(model, True)


@pytest.mark.parametrize("launcher", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])  # torchrun's and DeepSpeed's
def test_free_memory_is_a_ranks_share_of_what_the_container_may_still_take(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # vLLM, in another test of this process, sets the first
        monkeypatch.delenv(name, raising=False)
    whole = memory.free_memory(torch.device("cpu"))
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(torch.device("cpu")) > whole / 2
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.free_memory(torch.device("cpu")) == 2000
    monkeypatch.setenv(launcher, "2")
    assert memory.free_memory(torch.device("cpu")) == 1000
