"""The choice of what layers keep, and its effect: results of the same bits from less memory."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from app.domain.ops import ForwardBackward, LoraSpec
from app.errors import SetupError
from app.settings import BaseModelSettings, TrainerSettings
from app.stack.memory import free_bytes
from tests import pictures
from tests.models import byte_tokenizer, tiny_qwen3
from tests.parity.architectures import build
from tests.parity.datums import batch, supervised
from tests.parity.test_memory import kept_bytes
from workers.backends.training import backends, engine, memory
from workers.backends.training import trainer as training
from workers.backends.training.base import Create
from workers.backends.training.lm_head import ChunkSizes, chunk_sizes
from workers.backends.training.memory import Activations, Footprint, choose
from workers.backends.training.trainer import Trainer

# 10 layers of 100 bytes a token, with inputs of 10. n of them computed again need 1100 - 90 n bytes.
FOOTPRINT = Footprint(whole=1000, layers=(100,) * 10, input=10)
SHORT, LONG = (9, 30, 4), (9, 400)
# Bytes in fp32 of the head for 10,000 tokens of 20 logits: all are kept, and a chunk and the work have fewer.
_HEAD = 4 * (200_000 + 2**17 + 150_000)
_OPT = {"vocab_size": 20, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(
    ("tokens", "usable", "host", "wanted"),
    [
        (60, 60_000, True, 0),
        (61, 60_000, True, 2),
        (100, 60_000, True, 6),
        (300, 60_000, True, 10),
        (301, 60_000, True, 11),
        (301, 60_000, False, 10),
        (1, -5, True, 11),
        (10**9, 60_000, False, 10),
    ],
)
def test_no_more_layers_are_computed_again_than_do_not_fit(tokens: int, usable: int, host: bool, wanted: int) -> None:
    assert choose(tokens, FOOTPRINT, usable, host=host) == wanted


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("host", [False, True])
def test_a_choice_fits_where_one_does_and_grows_with_tokens_and_with_less_memory(seed: int, host: bool) -> None:
    """Of layers of unequal size, as in hybrid models."""
    drawn = random.Random(seed)
    layers = [drawn.uniform(50, 500) for _ in range(drawn.randint(8, 12))]
    footprint = Footprint(sum(layers) + drawn.uniform(0, 100), layers, drawn.uniform(1, 50))
    lengths = sorted(drawn.sample(range(1, 1000), 20))
    memories = sorted(drawn.sample(range(int(1000 * footprint.whole)), 20))
    table = [[choose(tokens, footprint, usable, host=host) for usable in memories] for tokens in lengths]
    for tokens, row in zip(lengths, table, strict=True):
        for usable, found in zip(memories, row, strict=True):
            fits = [tokens * footprint.peak(again) <= usable for again in range(len(layers) + 1)]
            assert found == (fits.index(True) if any(fits) else len(layers) + host)
    assert all(row == sorted(row, reverse=True) for row in table)
    assert all(list(column) == sorted(column) for column in zip(*table, strict=True))
    assert len({found for row in table for found in row}) > 3


def test_layers_computed_again_take_the_place_of_those_behind_them() -> None:
    """Those are freed by then. One layer, the largest, is counted on top."""
    footprint = Footprint(whole=1000, layers=(300, 200, 400), input=10)
    assert [footprint.peak(again) for again in range(4)] == [1000, 1110, 920, 530]


@pytest.mark.parametrize(
    ("usable", "setting", "wanted"),
    [
        (60_000_000, "auto", 8192),
        (6_000_000, "auto", 5120),
        (2_048_000, "auto", 2048),
        (2_047_000, "auto", 8192),  # 2,047 fit, and 10,235 when all layers are computed again
        (600_000, "auto", 2048),
        (1_800_000, False, 1024),
        (6_000_000, True, 8192),
        (-5, "auto", 1024),
    ],
)
def test_a_gpus_micro_batch_is_as_large_as_its_memory_allows(
    usable: int, setting: bool | Literal["auto"], wanted: int
) -> None:
    assert memory.micro_batch_tokens(FOOTPRINT, usable, setting, most=8192) == wanted


def test_a_narrow_models_micro_batch_has_more_tokens_but_not_without_end() -> None:
    """Its kernels would be shorter than the host takes to launch them."""
    widths = (64, 1024, 2048, 2560, 4096, 8192)
    most = [memory.most_tokens(width, packed=True) for width in widths]
    assert most == [32_768, 32_768, 16_384, 8192, 8192, 8192]
    assert {memory.most_tokens(width, packed=False) for width in widths} == {8192}
    assert memory.micro_batch_tokens(FOOTPRINT, 10**9, "auto", most=32_768) == 32_768


@pytest.mark.parametrize(
    ("device", "trained", "wanted"),
    [("cuda", False, 0.8 * (10**9 - _HEAD)), ("cuda", True, 0.6 * (10**9 - _HEAD)), ("cpu", False, 0.6 * 10**9)],
)
def test_of_a_gpus_memory_the_head_takes_its_part_and_gradients_a_fifth_of_the_rest(
    device: str, trained: bool, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and where the base is trained, two fifths are left."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    monkeypatch.setattr(memory, "chunk_sizes", lambda device: ChunkSizes(rows=1, work=150_000, kept=10**6))
    model = AutoModelForCausalLM.from_config(OPTConfig(**_OPT), dtype=torch.float32).requires_grad_(trained)
    assert Activations(model, "auto")._usable(10_000, torch.device(device)) == wanted


def test_the_head_takes_three_32ths_of_a_gpus_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the figures of `chunk_sizes`: a chunk 1/64, the work 1/64, what is kept 1/16."""
    size = 80 * 2**30
    gpu = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(total_memory=size))
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    sizes = chunk_sizes.__wrapped__(torch.device("cuda"))
    assert sizes.bytes(10**12, itemsize=2) == size * 3 / 32
    assert sizes.bytes(1000, itemsize=2) == 1000 * (2 + 2 + 4)


def test_a_cpus_micro_batch_does_not_depend_on_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**50)
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), trainer={"backend": "torch"}))
    backend.open()
    assert backend.describe()["micro_batch_tokens"] == 1024


def test_full_fine_tuning_leaves_a_gpus_memory_to_gradients_and_optimizer_state(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The micro-batch has what else is free."""
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), trainer={"backend": "torch"}), full=True)
    backend.open()
    hidden_states = backend._engine.hidden_states
    footprint = hidden_states._activations._footprint_by(partial(hidden_states._probe, torch.device("cpu")))
    state = 10**9
    monkeypatch.setattr(engine, "bytes_of_trained", lambda model, trainer: state)
    monkeypatch.setattr(memory, "chunk_sizes", lambda device: ChunkSizes(rows=1, work=0, kept=0))

    def tokens(free: float) -> int:
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        return hidden_states.micro_batch_tokens(torch.device("cuda"))

    assert tokens(state + 4200 * footprint.whole / 0.6) == 4096
    assert tokens(state - 1) == 1024


@pytest.mark.parametrize("tokens", ["auto", 512])
def test_a_trainer_says_at_its_start_if_the_state_of_a_full_fine_tune_does_not_fit(
    tokens: str | int, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = {"backend": "torch", "micro_batch_tokens": tokens}
    settings, said = BaseModelSettings(name="tiny", path=str(base), trainer=trainer), []
    monkeypatch.setattr(training, "warn_if_short", lambda *what: said.append(what))
    for full in (False, True):
        backends.create(settings, full=full).open()
    [(model, section, _)] = said
    needed = memory.bytes_of_trained(model, section)
    for free, warns in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        memory.warn_if_short(model, section, torch.device("cuda"))
        assert ("set trainer.ranks and trainer.zero_stage higher, or trainer.offload" in caplog.text) is warns


@pytest.mark.parametrize(
    ("ranks", "stage", "offload", "bytes_each"),
    [
        (1, 2, False, 2 + 12 + 8),
        (4, 0, False, 2 + 12 + 8),
        (4, 1, False, 2 + 12 / 4 + 4 + 8 / 4),
        (4, 2, False, 12 / 4 + 8 / 4),
        (4, 3, False, 12 / 4 + 8 / 4),
        (1, 2, True, 2),
        (4, 3, True, 0),
    ],
)
def test_the_state_of_full_fine_tuning_takes_what_decision_9_says(
    ranks: int, stage: int, offload: bool, bytes_each: float
) -> None:
    """The head's own gradient is in fp32. From stage 2 on, the gradients of a layer, and those of no layer, are whole,
    also in fp32."""
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=40)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer, body = (sum(w.numel() for w in m.parameters()) for m in (model.model.layers[0], model))
    on_top = 6 * (body - 2 * layer) if stage >= 2 and ranks > 1 else 2 * 40 * 8
    trainer = TrainerSettings(ranks=ranks, zero_stage=stage, offload=offload)
    wanted = bytes_each * body + on_top
    # Whole tensors are divided among the ranks, the fullest of which has a little more than its part.
    assert wanted <= memory.bytes_of_trained(model, trainer) <= wanted * 1.02


def test_the_rank_with_the_embedding_holds_all_of_it() -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=4000
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    trainer = TrainerSettings(ranks=8, zero_stage=2)
    body = sum(weight.numel() for weight in model.parameters())
    assert memory.bytes_of_trained(model, trainer) == 20 * 4000 * 8 + 6 * body


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


def computed_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The choices of all later passes."""
    found: list[int] = []

    def noted(*args: object, **settings: bool) -> int:
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
    assert (chosen, layers) == ([0] * 3, [])
    # The activations of some 100 to 300 tokens of this model fit.
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**21)
    chosen.clear()
    assert results(opened(base, "auto")) == wanted
    assert chosen == [0, 2, 0]
    assert len(layers) == 2  # the model's layers, in one pass


def test_inputs_that_lie_in_host_memory_change_no_bit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = results(opened(base, False))
    moved = []
    packed = torch.autograd.graph.save_on_cpu

    def counted(**settings: bool) -> object:
        moved.append(settings)
        return packed(**settings)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counted)
    monkeypatch.setattr(memory, "choose", lambda *_, **__: 3)  # one more than the model has layers
    assert results(opened(base, "auto")) == wanted
    assert len(moved) == 3


def test_layers_of_a_vision_tower_are_neither_counted_nor_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen, and its layers come before those of the text."""
    backend = opened(pictures.tiny_reader("qwen3-vl", tmp_path), "auto")
    monkeypatch.setattr(memory, "choose", lambda *_, **__: 1)
    backend.apply({"m": ForwardBackward(batch(supervised(0, SHORT, vocab=pictures.PLACEHOLDER)), "cross_entropy")})
    activations, text = backend._engine.hidden_states._activations, backend._engine.base.model.model.language_model
    assert len(activations._footprint.layers) == len(text.layers) < len(activations._layers)
    assert [layer for layer in activations._layers if layer.gradient_checkpointing] == [text.layers[0]]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3.5", "deepseek-v3", "nemotron-h", "kimi-linear"])
@pytest.mark.parametrize("lengths", [[1500], [100 + 37 * datum for datum in range(12)]], ids=["long", "uneven"])
def test_a_pass_keeps_as_many_bytes_a_token_as_two_small_passes_said(
    family: str, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter on every linear, and however many layers are computed again."""
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
    assert len(footprint.layers) == backend._engine.base.model.config.num_hidden_layers
    for again in range(len(footprint.layers) + 1):
        monkeypatch.setattr(memory, "choose", lambda *_, again=again, **__: again)
        with kept_bytes(backend) as kept:
            backend.apply(op)
        on_top = max(footprint.layers) if again else 0
        expected = sum(lengths) * (footprint.peak(again) - on_top)
        assert sum(kept) == pytest.approx(expected, rel=0.2), again


def test_what_a_layer_within_a_layer_keeps_is_counted_once() -> None:
    """As in Zamba2. What the outer one keeps before the inner one starts counts for none, as if always kept."""
    inner = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
    outer = torch.nn.Sequential(torch.nn.Tanh(), inner, torch.nn.Tanh())
    with memory._kept_bytes() as found, memory._by_layer([outer, inner], found) as shares:
        outer(torch.ones(8, requires_grad=True))
    assert (sum(found.values()), shares) == (4 * 32, {inner: 2 * 32, outer: 32})


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
    (tmp_path / "own").write_text("0::/job/step\n")
    (job := tmp_path / "job").mkdir()
    monkeypatch.setattr(memory, "free_bytes", partial(free_bytes, groups=tmp_path, own=tmp_path / "own"))
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # vLLM, in another test of this process, sets the first
        monkeypatch.delenv(name, raising=False)
    whole = memory.free_memory(torch.device("cpu"))
    (job / "memory.max").write_text("max\n")
    assert memory.free_memory(torch.device("cpu")) > whole / 2
    (job / "memory.max").write_text("3000\n")
    (job / "memory.current").write_text("1000\n")
    assert memory.free_memory(torch.device("cpu")) == 2000
    monkeypatch.setenv(launcher, "2")
    assert memory.free_memory(torch.device("cpu")) == 1000
