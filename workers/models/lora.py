"""LoRA adapters beside a frozen base: many adapters of any rank, chosen token by token inside one forward pass.

`wrap` puts a `LoraLinear` around every linear an adapter may sit on; `use` says which tokens belong to which adapter.
The choice is a context variable, so passes in different threads do not see each other. An adapter is kept as fp32
masters and cast to the activation's dtype in compute. On disk it has the format of the `peft` library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.domain.ops import LoraSpec
from app.errors import UserOpError
from workers.backends.training.base import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from workers.models import coverage

_KEY_PREFIX = "base_model.model."
# The name that transformers gives to the head of a sequence classifier. PEFT keeps this head beside the adapter, under
# the same name.
_SCORE = "score"
_SCORE_KEY = f"{_KEY_PREFIX}{_SCORE}.weight"


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One linear's part of an adapter, fp32: `a` [rank, in_features], `b` [out_features, rank]."""

    a: nn.Parameter
    b: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Adds `scaling * x Aᵀ Bᵀ` to the output of every linear in `pairs`, which is keyed by module path.

    A critic's `value_head`, fp32 [1, hidden size], gives the value of each token from its last hidden state.
    """

    spec: LoraSpec
    pairs: dict[str, LoraPair]
    value_head: nn.Parameter | None = None

    @property
    def critic(self) -> bool:
        return self.value_head is not None

    @property
    def scaling(self) -> float:
        return self.spec.alpha / self.spec.rank

    def tensors(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name in a PEFT file, sorted by path, and the value head last. So an adapter read from
        files has the order of a new one, and its gradients' norm has the same last bit."""
        found = {
            f"{_KEY_PREFIX}{path}.lora_{part}.weight": parameter
            for path, pair in sorted(self.pairs.items())
            for part, parameter in (("A", pair.a), ("B", pair.b))
        }
        return found if self.value_head is None else {**found, _SCORE_KEY: self.value_head}

    def drop_gradients(self) -> None:
        """Removes every parameter's `.grad`."""
        for parameter in self.tensors().values():
            parameter.grad = None

    def to(self, device: torch.device) -> Adapter:
        """A copy on `device`."""

        def copied(parameter: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(parameter.detach().to(device, copy=True))

        pairs = {path: LoraPair(copied(pair.a), copied(pair.b)) for path, pair in self.pairs.items()}
        return Adapter(self.spec, pairs, None if self.value_head is None else copied(self.value_head))


Segments = Sequence[tuple[Adapter | None, int]]
_segments: ContextVar[Segments] = ContextVar("lora_segments", default=())


@contextmanager
def use(segments: Segments) -> Iterator[None]:
    """Within the block, consecutive shares of a forward's tokens belong to these (adapter, how many).

    Shares are counted in tokens, or in rows of equally many tokens; None is the base alone.
    """
    token = _segments.set(tuple(segments))
    try:
        yield
    finally:
        _segments.reset(token)


def in_use() -> Segments:
    """The segments that `use` set in this context."""
    return _segments.get()


class LoraLinear(nn.Module):
    """A frozen linear plus the adapters that `use` names. The linear stays a submodule, so hooks on it still run."""

    def __init__(self, base: nn.Linear, path: str) -> None:
        super().__init__()
        self.base = base
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        flat = x.reshape(-1, x.shape[-1])
        runs = list(_runs(_segments.get(), self.path, len(flat)))
        tensors = [tensor for run in runs for pair in run.pairs for tensor in (pair.a, pair.b)]
        if not tensors:
            return out
        if torch.is_inference_mode_enabled():
            return _add_in_place(flat, out.view(len(flat), -1), runs).view(out.shape)
        added: Tensor = _AddProducts.apply(flat, out.reshape(len(flat), -1), runs, *tensors)  # type: ignore[no-untyped-call]
        return added.view(out.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """`rows` of x. Each of `pairs`, which share one shape and scaling, gets equally many of them; without pairs the
    rows have no adapter."""

    rows: slice
    pairs: Sequence[LoraPair]
    scaling: float


def _runs(segments: Segments, path: str, tokens: int) -> Iterator[_Run]:
    def likeness(segment: tuple[Adapter | None, int]) -> tuple[int, int, float]:
        adapter, count = segment
        if adapter is None or path not in adapter.pairs:
            return 0, 0, 0.0
        return count, adapter.spec.rank, adapter.scaling

    unit = tokens // max(1, sum(count for _, count in segments))
    start = 0
    for (_, _, scaling), group in groupby(segments, likeness):
        alike = [*group]
        rows = slice(start, start + unit * sum(count for _, count in alike))
        start = rows.stop
        yield _Run(rows, [adapter.pairs[path] for adapter, _ in alike if adapter is not None and scaling], scaling)


class _AddProducts(torch.autograd.Function):
    """out + scaling · x Aᵀ Bᵀ, run by run of the rows.

    The backward pass is written by hand: with autograd every adapter would add a handful of nodes and copies in each of
    hundreds of linears. The products are batched: eight adapters of 64 tokens one after another take twice as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, runs: Sequence[_Run], *tensors: Tensor) -> Tensor:
        """Computes the output. `tensors` are the runs' A, B, A, B, ..., which autograd must see."""
        added = torch.empty_like(out)
        saved = []
        for run in runs:
            if not run.pairs:
                added[run.rows] = out[run.rows]
                continue
            low, a, b = _lowered(x, run)
            torch.baddbmm(_split(out, run), low, b.mT, out=_split(added, run))
            saved += [low, a, b]
        ctx.runs = runs
        ctx.save_for_backward(x, *saved)
        return added

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (gradient,) = grads
        x, *saved = ctx.saved_tensors
        x_gradient = torch.zeros_like(x)
        found: list[Tensor] = []
        adapted = [run for run in ctx.runs if run.pairs]
        for run, low, a, b in zip(adapted, saved[::3], saved[1::3], saved[2::3], strict=True):
            share = _split(gradient, run)
            low_gradient = torch.bmm(share, b).mul_(run.scaling)
            torch.bmm(low_gradient, a, out=_split(x_gradient, run))
            of_a, of_b = torch.bmm(low_gradient.mT, _split(x, run)), torch.bmm(share.mT, low)
            found += [tensor for pair in zip(of_a.float(), of_b.float(), strict=True) for tensor in pair]
        return x_gradient, gradient, None, *found


def _add_in_place(x: Tensor, out: Tensor, runs: Sequence[_Run]) -> Tensor:
    """Adds the products without gradients, and without a copy of the output or of a single adapter's weights.

    Weights of several adapters are copied into one product. On two cores, four adapters of rank 32 over 64 rows of
    SmolLM2-135M take 0.1 ms a linear this way, and 0.2 ms one by one, since each small product has a fixed cost.
    """
    for run in runs:
        if len(run.pairs) == 1:
            a, b = (weights.to(x.dtype).t() for weights in (run.pairs[0].a, run.pairs[0].b))
            out[run.rows].addmm_(x[run.rows] @ a, b, alpha=run.scaling)
        elif run.pairs:
            low, _, b = _lowered(x, run)
            _split(out, run).baddbmm_(low, b.mT)
    return out


def _lowered(x: Tensor, run: _Run) -> tuple[Tensor, Tensor, Tensor]:
    """Computes scaling · x Aᵀ [pairs, rows of each, rank] of a run with pairs. Also returns their A [pairs, rank, in]
    and B [pairs, out, rank]; all are in x's dtype."""
    a = torch.stack([pair.a for pair in run.pairs]).to(x.dtype)
    b = torch.stack([pair.b for pair in run.pairs]).to(x.dtype)
    return torch.bmm(_split(x, run), a.mT).mul_(run.scaling), a, b


def _split(tensor: Tensor, run: _Run) -> Tensor:
    """The run's rows of `tensor`, [pairs, rows of each, features]."""
    return tensor[run.rows].view(len(run.pairs), -1, tensor.shape[1])


def wrap(model: nn.Module) -> None:
    """Replaces, in place, every linear `targets` names by a LoraLinear around it."""
    for path in [path for paths in targets(model).values() for path in paths]:
        parent, _, name = path.rpartition(".")
        linear = model.get_submodule(path)
        if isinstance(linear, nn.Linear):
            setattr(model.get_submodule(parent), name, LoraLinear(linear, path))


def unwrapped_name(model: nn.Module, parameter: str) -> str:
    """The name that a parameter had before `wrap`."""
    path, _, leaf = parameter.rpartition(".")
    outer = path.rpartition(".")[0]
    return f"{outer}.{leaf}" if isinstance(model.get_submodule(outer), LoraLinear) else parameter


def targets(model: nn.Module) -> dict[str, list[str]]:
    """The paths of the linears an adapter can sit on, by group (attn, mlp, unembed), before or after `wrap`."""
    found = [path for path, module in model.named_modules() if isinstance(module, nn.Linear | LoraLinear)]
    return coverage.groups(found, experts=coverage.has_experts(model))


def new_adapter(model: nn.Module, spec: LoraSpec, *, critic: bool = False) -> Adapter:
    """Returns a new adapter on the CPU, for a wrapped or bare model. It changes no output until trained, since B is
    zero.

    A is kaiming_uniform(a=sqrt(5)), sampled on the CPU from `spec.seed` alone, so every device and rank has the same A.
    A critic has no pair on the head it does not use. Its own value head is N(0, 1/(hidden size + 1)), as in OpenRLHF:
    values start next to 0, where returns mostly are, but not at 0, since a zero head would give the adapter no
    gradient.
    """
    spec = replace(spec, train_unembed=False) if critic else spec
    generator = torch.Generator("cpu").manual_seed(spec.seed)
    pairs = {}
    for path in _chosen(model, spec):
        in_features, out_features = _features(model.get_submodule(path))
        a = nn.init.kaiming_uniform_(torch.empty(spec.rank, in_features), a=sqrt(5), generator=generator)
        pairs[path] = _pair(a, torch.zeros(out_features, spec.rank))
    return Adapter(spec, pairs, new_value_head(model, generator) if critic else None)


def new_value_head(model: nn.Module, generator: torch.Generator) -> nn.Parameter:
    """Returns a new value head, fp32 [1, hidden size], on the CPU; see new_adapter."""
    width = _hidden_size(model)
    return nn.Parameter(torch.empty(1, width).normal_(0.0, 1 / (width + 1), generator=generator))


def check_fits(adapter: Adapter, model: nn.Module) -> None:
    """Raises UserOpError when the adapter's paths or shapes are not those its spec gives on this model."""
    expected = {path: _features(model.get_submodule(path)) for path in _chosen(model, adapter.spec)}
    found = {path: (pair.a.shape[1], pair.b.shape[0]) for path, pair in adapter.pairs.items()}
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise UserOpError(
                f"the adapter does not fit this base model: {path} has (in, out) features {found.get(path)} in the "
                f"file and {expected.get(path)} in the model; load it on the base model it was trained on"
            )
    if adapter.value_head is not None and adapter.value_head.shape != (1, _hidden_size(model)):
        raise UserOpError(
            f"the value head has shape {list(adapter.value_head.shape)}, but this base model needs [1, "
            f"{_hidden_size(model)}]: load a critic that was trained on this base model"
        )


def check_role(adapter: Adapter, *, critic: bool) -> None:
    """Raises UserOpError unless the adapter, read from a checkpoint, is a critic's or a policy's, as `critic` asks."""
    if adapter.critic != critic:
        found, wanted = ("critic", "policy") if adapter.critic else ("policy", "critic")
        raise UserOpError(
            f"the checkpoint is of a {found}, but this model is a {wanted}: their heads differ. Load a checkpoint of "
            f"a {wanted}"
        )


def write_peft(adapter: Adapter, folder: Path, base_model_name: str, model: nn.Module | None = None) -> None:
    """Writes `adapter` as PEFT's two files. On a tied head the pair belongs to the head alone; the embedding has none.

    A critic is stored as a sequence classifier with one label. `model`, wrapped or bare, is where the adapter belongs:
    without it, modules are named by their last names alone.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": adapter.spec.rank,
        "lora_alpha": adapter.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": _target_modules(adapter, model),
    }
    if adapter.critic:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": [_SCORE]}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2))
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in adapter.tensors().items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def _target_modules(adapter: Adapter, model: nn.Module | None) -> list[str]:
    """The last names of the adapter's modules; or their whole paths, where a last name alone would also name another
    module, such as one of a vision tower, on which PEFT would put an adapter too."""
    leaves = {_leaf(path) for path in adapter.pairs}
    others = () if model is None else (path for path, _ in model.named_modules() if path not in adapter.pairs)
    return sorted(adapter.pairs if any(_leaf(path) in leaves for path in others) else leaves)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def read_peft(folder: Path) -> Adapter:
    """Reads the adapter in `folder`, on the CPU. Its spec's seed is 0, as nothing is sampled from it any more.

    Raises UserOpError when the files are missing, damaged, or use PEFT features other than plain LoRA and a critic's
    value head.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
        stored = load_file(folder / ADAPTER_FILE)
        head = nn.Parameter(stored.pop(_SCORE_KEY).float()) if config.get("modules_to_save") else None
        return Adapter(_spec_of(config), _pairs_of(stored, int(config["r"])), head)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserOpError(f"{folder.name} holds no plain LoRA adapter in PEFT files: {error}") from None


def _spec_of(config: dict[str, object]) -> LoraSpec:
    modules = config["target_modules"]
    if not isinstance(modules, list) or not isinstance(config["lora_alpha"], int | float):
        raise ValueError("target_modules must be a list and lora_alpha a number")
    leaves = {_leaf(str(name)) for name in modules}
    attn, mlp, unembed = (any(_leaf(name) in leaves for name in names) for names in coverage.GROUPS.values())
    return LoraSpec(int(str(config["r"])), attn, mlp, unembed, alpha=config["lora_alpha"])


def _pairs_of(stored: dict[str, Tensor], rank: int) -> dict[str, LoraPair]:
    paths = [key[len(_KEY_PREFIX) : -len(".lora_A.weight")] for key in stored if key.endswith(".lora_A.weight")]
    pairs = {}
    for path in paths:
        a = stored.pop(f"{_KEY_PREFIX}{path}.lora_A.weight").float()
        b = stored.pop(f"{_KEY_PREFIX}{path}.lora_B.weight").float()
        if a.shape[0] != rank or b.shape[1] != rank:
            raise ValueError(f"{path} has shapes {list(a.shape)} and {list(b.shape)}, which do not have rank {rank}")
        pairs[path] = _pair(a, b)
    if stored:
        raise ValueError(f"unknown tensor {next(iter(stored))}")
    return pairs


def _chosen(model: nn.Module, spec: LoraSpec) -> list[str]:
    """The target paths that a spec asks for, in the model's order."""
    wanted = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    return [path for group, paths in targets(model).items() if wanted[group] for path in paths]


def _features(linear: nn.Module) -> tuple[int, int]:
    """(in, out) features of the linear. ZeRO-3 empties the weight's shape, so the module's own record is used."""
    core = linear.base if isinstance(linear, LoraLinear) else linear
    assert isinstance(core, nn.Linear)
    return core.in_features, core.out_features


def _hidden_size(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().hidden_size)


def _pair(a: Tensor, b: Tensor) -> LoraPair:
    return LoraPair(nn.Parameter(a), nn.Parameter(b))
