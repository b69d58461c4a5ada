"""Lays out models on paper: bytes of a rank and seconds of a step on many GPUs, in the tables of docs/scaling.md, and
the layers to compute again on one card, in the table of docs/setup.md.

`python -m ops.scaling` writes them there.

Counts of weights come from the models' code on the meta device, the choice of layers that are computed again from the
trainer's own (workers/backends/training/memory.py). What a layer keeps of a token is a formula; tests compare it with a
measurement on a stand-in for a GPU, and whole ranks with peaks that an H200 measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from app.domain.adapters import Shape
from app.stack.hardware import SHARED
from ops.gpu_check import shapes
from workers.backends.training.lm_head import ChunkSizes
from workers.backends.training.memory import USABLE_ON_GPU, Footprint, choose
from workers.models import experts, lora

_DOCS = Path(__file__).parents[1] / "docs"
_TABLES = re.compile(r"(?<=<!-- ops\.scaling -->\n).*?(?=<!-- end -->)", re.DOTALL)
STEP_TOKENS = 32_768
_DATUM = 8192
# Of Qwen3-8B, rank 32, datums of 8,192 tokens, on one H200 (ops/bench/results/gpu.json: 0.50); assumed for others.
MFU = 0.49
_PEAK_FLOPS = 989e12
# Bytes a second that a rank sends, by datasheet: NVLink in a host; between hosts eight cards of 400 Gbit/s for 8 GPUs.
_NVLINK, _BETWEEN_HOSTS = 450e9, 400e9
_PADDING = 8  # to which ranks of adapters are rounded up in grouped products

CONFIGS: Mapping[str, PretrainedConfig] = {
    # Sizes from the config.json of meta-llama/Meta-Llama-3-70B and Qwen/Qwen3-235B-A22B.
    "Llama-3-70B": LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "Qwen3-235B-A22B": Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    ),
    **{f"Qwen3-{size}": shapes.config(size) for size in ("0.6B", "4B", "8B")},
    # Sizes from the config.json of Qwen/Qwen3-32B.
    "Qwen3-32B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpus` of `memory` bytes each, over all hosts."""

    name: str
    gpus: int
    memory: float
    bandwidth: float = _NVLINK


H100S, H200S = Machine("8 × H100", 8, 80e9), Machine("8 × H200", 8, 141e9)
TWO_HOSTS = Machine("2 × 8 H100", 16, 80e9, _BETWEEN_HOSTS)


@dataclass(frozen=True, slots=True)
class Settings:
    """The trainer's settings of these names, and an adapter's."""

    zero_stage: int = 2
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    rank: int = 32
    train_mlp: bool = True
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        parts = {"tensor_parallel": self.tensor_parallel, "sequence_parallel": self.sequence_parallel}
        shown = [f"`zero_stage = {self.zero_stage}`", *(f"`{name} = {n}`" for name, n in parts.items() if n > 1)]
        shown += [f"dtype {self.dtype}"] if self.dtype != "bfloat16" else []
        return ", ".join(shown) + f"; rank {self.rank}" + ("" if self.train_mlp else ", `train_mlp = false`")


class Model:
    """Counts of a model whose layers are alike. `chosen`: the part of its experts that a token runs."""

    def __init__(self, config: Any) -> None:
        self.config, self.layers = config, int(config.num_hidden_layers)
        fields = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
        self._one = type(config).from_dict({**fields, "num_hidden_layers": 1})
        self.chosen = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)

    @cached_property
    def _meta(self) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self._one, dtype=torch.bfloat16)

    @property
    def layer(self) -> int:
        """Elements of a layer."""
        return _elements(self._meta.model.layers)

    @property
    def rest(self) -> int:
        """Elements of embeddings, head and last norm."""
        return _elements(self._meta) - self.layer

    @property
    def largest(self) -> int:
        """Elements of the largest weight of a layer."""
        return max(int(weight.numel()) for weight in self._meta.model.layers.parameters())

    def adapter(self, settings: Settings, *, used: bool = False) -> int:
        """Elements of an adapter on all layers, or those that a token is multiplied with."""
        found = 0.0
        for path, (inputs, outputs, count), times in self._shapes():
            if settings.train_mlp or ".mlp." not in path:
                found += times * count * (inputs + outputs) * (self._share(path) if used else 1)
        return round(found * settings.rank)

    def flops(self, settings: Settings, length: int) -> float:
        """Operations of a token in a datum of `length`, forward and backward, as ops/gpu_check/shapes.py counts."""
        frozen = sum(
            times * count * inputs * outputs * self._share(path)
            for path, (inputs, outputs, count), times in self._shapes()
        )
        attention = 6 * self.config.num_attention_heads * self.config.head_dim * self.layers * length
        return float(4 * frozen + 6 * self.adapter(settings, used=True) + attention)

    def kept(self, settings: Settings, *, fused: bool = True) -> float:
        """Bytes of bf16 and fp32 that autograd keeps of a token in a layer. `fused`: with liger-kernel's norms and
        gates, the default on a GPU; experts have gates of their own."""
        config, parts = self.config, settings.tensor_parallel
        width, heads = config.hidden_size, config.num_attention_heads / parts
        queries = heads * config.head_dim
        keys = max(config.num_key_value_heads / parts, 1) * config.head_dim
        normed = 2 if fused else 4
        norms = 2 * (normed * width + 4)
        if config.model_type.startswith("qwen3"):
            norms += normed * (queries + keys) + 4 * (heads + keys / config.head_dim)
        attention = 2 * (2 * queries + 2 * keys) + 4 * heads
        low = 2 * (settings.rank + -settings.rank % _PADDING)
        return float(norms + attention + 2 * width + 4 * low) + self._kept_of_mlp(parts, low, fused)

    def _kept_of_mlp(self, parts: int, low: int, fused: bool) -> float:
        config = self.config
        if self.chosen == 1:
            return float(2 * config.hidden_size + (3 if fused else 4) * 2 * config.intermediate_size / parts + 3 * low)
        units, rows = config.moe_intermediate_size, config.num_experts_per_tok  # a rank keeps rows of all experts
        return float(rows * (2 * 2 * config.hidden_size + 4 * 2 * units + 2 * low))

    def _shapes(self) -> Iterator[tuple[str, Shape, int]]:
        """Yields the path of each pair of a layer, and of the head; its shape; and how many of it there are."""
        for group, paths in lora.shapes(self._meta).items():
            for path, shape in paths.items():
                yield path, shape, 1 if group == "unembed" else self.layers

    def _share(self, path: str) -> float:
        """The part of a pair that a token is multiplied with."""
        return self.chosen if experts.is_pair(path) else 1


def _elements(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a trainer on all GPUs of a machine."""

    model: Model
    machine: Machine
    settings: Settings

    def base(self) -> float:
        """Bytes of the base. ZeRO-3 has two layers whole, one in use and one on its way. Weights in nf4 have a scale of
        fp32 for 64 numbers, and the largest is there in bf16 once while it is used."""
        layers, settings = self.model.layer * self.model.layers, self.settings
        if settings.zero_stage == 3:
            return 2 * ((layers + self.model.rest) / self.machine.gpus + 2 * self.model.layer)
        if settings.dtype == "nf4":
            return (4 / 8 + 4 / 64) * layers + 2 * (self.model.largest + self.model.rest)
        return 2 * (layers / settings.tensor_parallel + self.model.rest)

    def adapter(self) -> float:
        """Bytes of one adapter, its copy in bf16, its gradient, the sum of the ranks' gradients, and this rank's part
        of Adam's state."""
        return self.model.adapter(self.settings) * (3 * 4 + 2 + 8 / self.machine.gpus)

    def head(self, tokens: int) -> float:
        own = tokens // (self.settings.tensor_parallel * self.settings.sequence_parallel)
        return ChunkSizes.of_gpu(int(self.machine.memory)).bytes(own * self.model.config.vocab_size, 2)

    def again(self, tokens: int) -> int | None:
        """Layers to compute again in a pass of so many tokens, one more if their inputs lie in host memory; None where
        not even one layer fits."""
        usable = (self.machine.memory - self.base() - self.adapter() - self.head(tokens)) * USABLE_ON_GPU
        own = tokens // self.settings.sequence_parallel
        fits = own * self.model.kept(self.settings) <= usable
        return choose(own, self._footprint(), usable, host=True) if fits else None

    def activations(self, tokens: int, again: int) -> float:
        own = tokens // self.settings.sequence_parallel
        if again > self.model.layers:
            return own * self.model.kept(self.settings)
        return own * self._footprint().peak(again)

    def products_s(self, again: int) -> float:
        """Seconds of STEP_TOKENS for each GPU. Computing a layer again is half of its forward and backward pass, since
        frozen weights have no gradient."""
        once = STEP_TOKENS * self.model.flops(self.settings, _DATUM) / (_PEAK_FLOPS * MFU)
        return once * (1 + min(again / self.model.layers, 1) / 2)

    def traffic_s(self, again: int) -> float:
        """Seconds in which a rank's link is busy: ZeRO-3's weights for each pass, or the sums of hidden states."""
        settings, model = self.settings, self.model
        walks = 2 + min(again / model.layers, 1)
        if settings.zero_stage == 3:
            passes = STEP_TOKENS * settings.sequence_parallel / _DATUM
            return passes * walks * 2 * (model.layer * model.layers + model.rest) / self.machine.bandwidth
        sums = 2 * walks * model.layers if settings.tensor_parallel > 1 else 0
        row: float = 2 * 2 * model.config.hidden_size * (settings.tensor_parallel - 1) / settings.tensor_parallel
        return STEP_TOKENS * settings.tensor_parallel * sums * row / _NVLINK

    def _footprint(self) -> Footprint:
        kept = self.model.kept(self.settings)
        return Footprint(kept * self.model.layers, [kept] * self.model.layers, 2 * self.model.config.hidden_size)


LAYOUTS: Mapping[str, Sequence[tuple[Machine, Settings]]] = {
    "Llama-3-70B": [
        (H100S, Settings(dtype="nf4")),
        (H100S, Settings(tensor_parallel=4)),
        (H100S, Settings(tensor_parallel=8)),
        (H100S, Settings(zero_stage=3)),
        (H100S, Settings(zero_stage=3, sequence_parallel=8)),
        (H200S, Settings(dtype="nf4")),
        (H200S, Settings(tensor_parallel=2)),
        (H200S, Settings(tensor_parallel=4)),
        (H200S, Settings(zero_stage=3)),
        (TWO_HOSTS, Settings(tensor_parallel=8)),
        (TWO_HOSTS, Settings(zero_stage=3)),
    ],
    "Qwen3-235B-A22B": [
        (H100S, Settings(tensor_parallel=8, train_mlp=False)),
        (H200S, Settings(tensor_parallel=8, train_mlp=False)),
        (H200S, Settings(tensor_parallel=8, rank=8)),
        (H200S, Settings(tensor_parallel=8)),
        (H200S, Settings(zero_stage=3, rank=8)),
        (TWO_HOSTS, Settings(tensor_parallel=8, train_mlp=False)),
        (TWO_HOSTS, Settings(zero_stage=3, train_mlp=False)),
        (TWO_HOSTS, Settings(zero_stage=3, rank=8)),
    ],
}
_HEAD = """
| {} | base | adapter | 8,192 tokens; layers computed again | 32,768 tokens | seconds |
|---|---|---|---|---|---|
"""


def tables() -> str:
    """The tables of the page, in GB (10⁹ bytes) and seconds."""
    return "".join(
        _HEAD.format(name) + "".join(_row(Rank(Model(CONFIGS[name]), *layout)) for layout in layouts)
        for name, layouts in LAYOUTS.items()
    )


def _row(rank: Rank) -> str:
    first = f"{rank.machine.name}: {rank.settings}"
    cells = [f"{rank.base() / 1e9:.1f}", f"{rank.adapter() / 1e9:.1f}"]
    cells += [_pass(rank, tokens) for tokens in (_DATUM, STEP_TOKENS)]
    again = rank.again(_DATUM)
    seconds = "–" if again is None else f"{rank.products_s(again):.1f} + {rank.traffic_s(again):.1f}"
    return f"| {' | '.join([first, *cells, seconds])} |\n"


def _pass(rank: Rank, tokens: int) -> str:
    again = rank.again(tokens)
    if again is None:
        return "does not fit"
    found = (rank.activations(tokens, again) + rank.head(tokens)) / 1e9
    return f"{found:.1f}; {_recomputed(again, rank.model.layers)}"


def _recomputed(again: int | None, layers: int) -> str:
    """The layers that are computed again, as in `Rank.again`; empty where nothing fits."""
    if again is None:
        return ""
    return f"{again} of {layers}" if again <= layers else "all, their inputs on the host"


CARDS = (24, 48, 80, 141)
"""Memory of one card in GB (10⁹ bytes)."""
_ON_A_CARD = (
    *((f"Qwen3-{size}", "bfloat16") for size in ("0.6B", "4B", "8B", "32B")),
    *((f"Qwen3-{size}", "nf4") for size in ("8B", "32B")),
)
_CARDS_HEAD = f"""
| Layers computed again | base + adapter | {" | ".join(f"{size} GB" for size in CARDS)} |
|---|---|{"---|" * len(CARDS)}
"""


def cards() -> str:
    """The table of the page: a trainer with a card of its own, and one that shares it with a sampler."""
    return _CARDS_HEAD + "".join(
        _card_row(name, Settings(dtype=dtype), share) for share in (1, SHARED) for name, dtype in _ON_A_CARD
    )


def _card_row(name: str, settings: Settings, share: float) -> str:
    model = Model(CONFIGS[name])
    ranks = [Rank(model, Machine("card", 1, size * 1e9 * share), settings) for size in CARDS]
    first = name + (f" in {settings.dtype}" if settings.dtype == "nf4" else "") + ("" if share == 1 else ", shared")
    cells = [f"{ranks[0].base() / 1e9:.1f} + {ranks[0].adapter() / 1e9:.1f} GB"]
    cells += [_recomputed(rank.again(_DATUM), model.layers) or "does not fit" for rank in ranks]
    return f"| {' | '.join([first, *cells])} |\n"


PAGES: Mapping[Path, Callable[[], str]] = {_DOCS / "scaling.md": tables, _DOCS / "setup.md": cards}


def written(page: Path) -> str:
    """The text of the page with today's tables."""
    return _TABLES.sub(lambda _: PAGES[page]() + "\n", page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path))
        print(f"wrote {path}")
