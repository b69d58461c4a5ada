"""Counts kernels, waits and kept bytes of training passes on a stand-in for a GPU, and prints them as JSON.

It has a process of its own, because the stand-in is known to the whole process. A layer's kernels and bytes are the
difference of a model with two layers and one with one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from app.domain.ops import AdamParams, Batch, ForwardBackward, OptimStep, Ragged
from app.settings import BaseModelSettings, TrainerSettings
from ops.bench import batches
from ops.bench.bare_trainer import BareTrainer
from tests.budgets.accelerator import DEVICE, Counts, counted
from tests.models import byte_tokenizer
from tests.parity.architectures import build
from workers.backends.training import attention, backends, lm_head
from workers.backends.training.attention import packed_attention
from workers.backends.training.memory import _kept_bytes
from workers.backends.training.packing import runs_of
from workers.models import fused

_VOCABULARY = 320


@dataclass(frozen=True)
class Case:
    """A pass of datums of these `lengths`, which the tenants share equally."""

    tenants: int
    lengths: Sequence[int]
    family: str = "qwen3"
    fused: bool = False

    def counts(self, folder: Path, layers: int) -> Counts:
        trainer = self._trainer(folder, layers)
        ops = {f"m{tenant}": _operation(own) for tenant, own in enumerate(self._shares())}
        trainer.apply(ops)
        with counted() as counts:
            trainer.apply(ops)
        return counts

    def step_counts(self, folder: Path, layers: int, passes: int) -> Counts:
        """Counts of all tenants' optimizer steps after so many passes. The steps clip, with two learning rates."""
        trainer = self._trainer(folder, layers)
        for _ in range(passes):
            trainer.apply({f"m{tenant}": _operation(own) for tenant, own in enumerate(self._shares())})
        with counted() as counts:
            trainer.apply({f"m{tenant}": _step(1e-3 * (1 + tenant % 2)) for tenant in range(self.tenants)})
        return counts

    def capture_waits(self, folder: Path, layers: int) -> int:
        """Waits for a copy of the first tenant's model, with its moments and its gradient."""
        trainer = self._trainer(folder, layers)
        trainer.apply({"m0": _operation(self._shares()[0])})
        with counted() as counts:
            trainer._backend.capture("m0", optimizer=True, gradients=True)
        return counts.waits.total()

    def kept(self, folder: Path, layers: int) -> float:
        """Bytes of each further token that autograd keeps of a forward over the datums."""
        trainer: Any = self._trainer(folder, layers)._backend
        found = []
        for times in (1, 2):
            lengths = [times * length for own in self._shares() for length in own]
            owners = [(trainer._states[f"m{tenant}"].adapter, len(own)) for tenant, own in enumerate(self._shares())]
            tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE)
            with _kept_bytes() as kept:
                trainer._engine.hidden_states(tokens, lengths, owners)
            found.append(sum(kept.values()))
        return (found[1] - found[0]) / sum(self.lengths)

    def _trainer(self, folder: Path, layers: int) -> BareTrainer:
        backends.rank_device = lambda settings: DEVICE
        fused.usable = fused._on_gpu = lambda place: self.fused
        return BareTrainer(_settings(folder, self.family, layers), self.tenants, rank=8)

    def _shares(self) -> list[Sequence[int]]:
        return [self.lengths[tenant :: self.tenants] for tenant in range(self.tenants)]


_EVEN, _UNEVEN = [32] * 16, [32 + 3 * datum for datum in range(16)]
CASES = {
    "1 tenant": Case(1, _EVEN),
    "1 tenant, uneven datums": Case(1, _UNEVEN),
    "1 tenant, 4 times the tokens": Case(1, [4 * length for length in _UNEVEN]),
    "16 tenants": Case(16, _EVEN),
    "16 uneven tenants": Case(16, _UNEVEN),
    "16 uneven tenants, experts": Case(16, _UNEVEN, "qwen3-moe"),
    "1 tenant, 16 uneven datums, sinks": Case(1, _UNEVEN, "gpt-oss"),
}
STEPS = {
    "1 tenant": (CASES["1 tenant"], 1),
    "16 uneven tenants": (CASES["16 uneven tenants"], 1),
    "16 uneven tenants, 2 passes": (CASES["16 uneven tenants"], 2),
}
FUSED = {"1 tenant": Case(1, _UNEVEN, fused=True), "16 uneven tenants": Case(16, _UNEVEN, fused=True)}


def _operation(lengths: Sequence[int]) -> ForwardBackward:
    """The Op of datums of these lengths."""
    parts = [batches.operation(batches.random_tokens(1, length, _VOCABULARY)).batch for length in lengths]
    inputs = {
        name: Ragged.of([one for part in parts for one in part.inputs[name]], column.values.dtype)
        for name, column in parts[0].inputs.items()
    }
    return ForwardBackward(
        Batch(Ragged.of([one for part in parts for one in part.tokens], np.int32), inputs), batches.LOSS
    )


def _step(learning_rate: float) -> OptimStep:
    return OptimStep(AdamParams(learning_rate=learning_rate, grad_clip_norm=1e-3))


def _settings(folder: Path, family: str, layers: int) -> BaseModelSettings:
    base = folder / f"{family} {layers}"
    if not base.exists():
        byte_tokenizer().save_pretrained(build(family, base, num_hidden_layers=layers))
    trainer = TrainerSettings(backend="torch")
    return BaseModelSettings(name="tests/budgets", path=str(base), dtype="bfloat16", trainer=trainer)


def _measured(case: Case, folder: Path) -> dict[str, Any]:
    one, two = (case.counts(folder, layers) for layers in (1, 2))
    layer = two.kernels.total() - one.kernels.total()
    calls = two.kernels["torch_attn._varlen_attn.default"] - one.kernels["torch_attn._varlen_attn.default"]
    kept = case.kept(folder, 2) - case.kept(folder, 1)
    rest = one.kernels.total() - layer
    return {"layer": layer, "attention": calls, "rest": rest, "waits": one.waits.total(), "kept": kept}


def _measured_steps(case: Case, folder: Path, passes: int) -> dict[str, Any]:
    counts = case.step_counts(folder, 2, passes)
    norms = sum(count for name, count in counts.kernels.items() if name.startswith("aten._foreach_norm"))
    return {"kernels": counts.kernels.total(), "norms": norms, "waits": counts.waits.total()}


def _layer_kernels(case: Case, folder: Path) -> int:
    one, two = (case.counts(folder, layers).kernels.total() for layers in (1, 2))
    return two - one


def _attention_error(window: int | None, *, sinks: bool = False, own_call: int = attention._OWN_CALL) -> float:
    """The largest relative error, in bf16, of attention on the stand-in and of its gradients, against fp32 on a CPU.

    `sinks`: each head has one. `own_call`: the length from which datums have a call for each length, which is padded to
    a multiple of 16."""
    attention._OWN_CALL, attention._STEP = own_call, 16
    torch.manual_seed(0)
    lengths = (5, 40, 40, 1, 17)
    shapes = [(1, heads, sum(lengths), 16) for heads in (4, 2, 2)] + [(4,)] * sinks
    exact = [torch.randn(shape).bfloat16().float() for shape in shapes]
    found = []
    for tensors in (exact, [tensor.bfloat16().to(DEVICE) for tensor in exact]):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        settings = {"scaling": 0.3, "sliding_window": window, "s_aux": leaves[3] if sinks else None}
        out, _ = packed_attention(torch.nn.Module(), *leaves[:3], None, runs=runs_of(lengths), **settings)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        found.append([tensor.detach().cpu().float() for tensor in (out, *gradients)])
    return max(float((one - other).norm() / one.norm()) for one, other in zip(*found, strict=True))


if __name__ == "__main__":
    lm_head._compiled = lambda: lm_head._exponentials  # torch compiles nothing for the stand-in
    with TemporaryDirectory() as made, counted():
        counts = {name: _measured(case, Path(made)) for name, case in CASES.items()}
        fused_layers = {name: _layer_kernels(case, Path(made)) for name, case in FUSED.items()}
        errors = {str(window): _attention_error(window) for window in (None, 3, 8)}
        errors |= {f"{window}, sinks": _attention_error(window, sinks=True) for window in (None, 3, 8)}
        errors["a call for each length"] = _attention_error(None, own_call=1)
        steps = {name: _measured_steps(case, Path(made), passes) for name, (case, passes) in STEPS.items()}
        captures = [CASES["1 tenant"].capture_waits(Path(made), layers) for layers in (1, 2)]
        found = {"counts": counts, "steps": steps, "captures": captures, "fused layers": fused_layers}
        print(json.dumps(found | {"attention errors": errors}))
