"""The typed Ops a model's journal holds. A live run, a replay and a merged pass all see exactly these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from app.domain.batch import Batch
from app.domain.custom_losses import CustomLoss

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """`alpha / rank` scales the adapter's output; `seed` draws A (B starts at zero)."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int = 0
    alpha: float = 32.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """`lora` is None where the base's own weights are trained. A `critic` gives a value for each token."""

    base_model: str
    lora: LoraSpec | None
    critic: bool = False


@dataclass(frozen=True, slots=True)
class AdamParams:
    """torch.optim.AdamW's names; `grad_clip_norm` is the greatest global L2 norm, 0 for no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Seq 0 of every model. `source` is a tinker:// path to start from, with its optimizer state if `optimizer`.

    `prefix` is where the path's files lay when the call was made: a replay must not see what it names by then.
    """

    kind: ClassVar[str] = "create_model"
    spec: ModelSpec
    source: str | None = None
    optimizer: bool = False
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Adds the batch's gradient to the pending one; with `forward_only` changes nothing.

    `custom` is the loss itself where `loss_fn` is custom: a replay must not depend on what its id names by then.
    """

    batch: Batch
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False
    custom: CustomLoss | None = None

    @property
    def kind(self) -> str:
        return FORWARD if self.forward_only else FORWARD_BACKWARD


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One AdamW step on the pending gradient, which is zero afterwards."""

    kind: ClassVar[str] = "optim_step"
    params: AdamParams


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Writes a checkpoint. `sampling_session_id` is set for an ephemeral one, which has no public path.

    `merged`: not the adapter but the model it makes of its base, as a Hugging Face folder. `inflight`: what the model's
    in-flight sampling sessions, this one and earlier ones, use from now on. `recipients`: age public keys; the files
    are for those who have one's secret.
    """

    kind: ClassVar[str] = "save_weights"
    checkpoint_kind: str
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    sampling_session_id: str | None = None
    merged: bool = False
    inflight: bool = False
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Replaces weights, and the optimizer state if `optimizer` (else it is reset); pending gradients are dropped.

    `prefix` as in CreateModel.
    """

    kind: ClassVar[str] = "load_weights"
    source: str
    optimizer: bool
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class DropGradients:
    """A seq that never came (a gap): whatever was pending is not a whole batch, so it goes."""

    kind: ClassVar[str] = "drop_gradients"


def as_asked(op: Op) -> Op:
    """What a repeat of the call says again: without what was looked up for it, nor the number the SDK draws anew for
    the sampling session each time it sends the same save (the first one's stands, and the result names it)."""
    if isinstance(op, SaveWeights) and op.sampling_session_id:
        return replace(op, sampling_session_id="")
    return replace(op, prefix="") if isinstance(op, CreateModel | LoadWeights) else op


Op = CreateModel | ForwardBackward | OptimStep | SaveWeights | LoadWeights | DropGradients
