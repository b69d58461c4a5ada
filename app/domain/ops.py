"""The typed Ops in a model's journal. A live run, a replay and a merged pass all get exactly these Ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from app.domain.batch import Batch
from app.domain.custom_losses import CustomLoss

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A LoRA adapter. `alpha / rank` scales its output; `seed` seeds the random A (B starts at zero)."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int = 0
    alpha: float = 32.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The specification of a model. `lora` is None for full fine-tuning. A `critic` returns a value for each token."""

    base_model: str
    lora: LoraSpec | None
    critic: bool = False


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with the names of torch.optim.AdamW. `grad_clip_norm` is the greatest global L2 norm; 0 means
    no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Creates a model; seq 0 of every model. `source` is a tinker:// path to start from, with its optimizer state if
    `optimizer`.

    `prefix` is the location of the path's files at the time of the call. A replay uses it, because the path may name
    other files later.
    """

    kind: ClassVar[str] = "create_model"
    spec: ModelSpec
    source: str | None = None
    optimizer: bool = False
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Adds the batch's gradient to the pending gradient; with `forward_only` it changes nothing.

    `custom` is the loss itself where `loss_fn` is custom, because its id may name another loss at the time of a replay.
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
    """Makes one AdamW step on the pending gradient. The pending gradient is zero afterwards."""

    kind: ClassVar[str] = "optim_step"
    params: AdamParams


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Writes a checkpoint. `sampling_session_id` is set for an ephemeral checkpoint, which has no public path.

    `merged`: writes the merged model (base and adapter) as a Hugging Face folder, not the adapter. `inflight`: the
    model's in-flight sampling sessions, this one and earlier ones, use these weights from now on. `recipients`: age
    public keys; only the holder of a matching secret key can read the files.
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
    """Stands for a seq that never came (a gap). It drops the pending gradient, because its batch is incomplete."""

    kind: ClassVar[str] = "drop_gradients"


def as_asked(op: Op) -> Op:
    """The part of an Op that is equal in a repeat of its call. It leaves out the values that the server looked up. It
    also leaves out the sampling session's number, because the SDK draws a new one each time it sends the same save; the
    number of the first call stays valid, and the result names it."""
    if isinstance(op, SaveWeights) and op.sampling_session_id:
        return replace(op, sampling_session_id="")
    return replace(op, prefix="") if isinstance(op, CreateModel | LoadWeights) else op


Op = CreateModel | ForwardBackward | OptimStep | SaveWeights | LoadWeights | DropGradients
