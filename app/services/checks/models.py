"""Checks of what a model is made from and how it is stepped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.domain.base_models import BaseModelInfo
from app.domain.ops import AdamParams, LoraSpec
from app.errors import BadRequest
from app.services.checks.values import in_range
from app.settings import BaseModelSettings

GROUPS = ("attn", "mlp", "unembed")
ROLE = "model_role"
POLICY, CRITIC = "policy", "critic"


def check_lora(lora: LoraSpec, max_rank: int, info: BaseModelInfo) -> None:
    """The rank is allowed, and something is left to train."""
    in_range("lora_config.rank", lora.rank, 1, max_rank)
    asked = [group for group in GROUPS if getattr(lora, f"train_{group}")]
    if not set(asked) & set(info.trainable_groups):
        wanted = ", ".join(f"train_{group}" for group in info.trainable_groups)
        raise BadRequest(f"lora_config leaves nothing to train: set at least one of {wanted} for {info.name}")


def check_sampled(lora: LoraSpec, trainer: BaseModelInfo, sampler: BaseModelInfo | None) -> None:
    """What the sampler, if there is one, could not apply is refused before it is trained."""
    trained = [group for group in trainer.trainable_groups if getattr(lora, f"train_{group}")]
    for group in trained:
        if sampler is not None and group not in sampler.trainable_groups:
            raise BadRequest(f"the sampler of {sampler.name} takes no adapter there: set train_{group} to false")


def asked_role(asked: Mapping[str, Any]) -> str | None:
    """POLICY or CRITIC, as the field model_role or that of user_metadata says (the SDK can send only the latter); None
    where neither is given."""
    given = [role for role in (asked.get(ROLE), asked["user_metadata"].get(ROLE)) if role is not None]
    for role in given:
        if role not in (POLICY, CRITIC):
            raise BadRequest(f"{ROLE} {str(role)[:80]!r} is unknown; it can be {POLICY} or {CRITIC}")
    if len(set(given)) > 1:
        raise BadRequest(
            f"{ROLE} is {given[0]}, but {given[1]} in user_metadata; send one of them, or the same in both"
        )
    return given[0] if given else None


def check_sampled_role(what: str, *, critic: bool) -> None:
    """Only a policy is sampled from."""
    if critic:
        raise BadRequest(
            f"{what} is a critic, which gives values and cannot be sampled from; save it with save_weights"
        )


def check_sampleable(base: BaseModelSettings, *, full: bool) -> None:
    """Raises BadRequest for all weights of a model where no sampler takes them."""
    if full and base.full_sampler is None:
        raise BadRequest(
            "this model was fine-tuned in full, which this server does not sample from: save it with "
            "save_weights_external, download it, and serve that folder, or have the server started with samplers for "
            "it (base_models.full_sampler in its settings)"
        )


def check_optimizer(config: Mapping[str, Any] | None) -> None:
    """AdamW is the only optimizer."""
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise BadRequest(f"optimizer {str(kind)[:80]!r} is not supported; use adamw")


def check_adam(params: AdamParams) -> None:
    """Finite, and where torch.optim.AdamW takes them; a zero eps would divide by zero on a zero gradient."""
    in_range("adam_params.learning_rate", params.learning_rate, 0)
    in_range("adam_params.beta1", params.beta1, 0, 1, open_ends=")")
    in_range("adam_params.beta2", params.beta2, 0, 1, open_ends=")")
    in_range("adam_params.eps", params.eps, 0, open_ends="(")
    in_range("adam_params.weight_decay", params.weight_decay, 0)
    in_range("adam_params.grad_clip_norm", params.grad_clip_norm, 0)
