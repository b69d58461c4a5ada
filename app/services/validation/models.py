"""Checks of models: base model and LoRA settings, optimizer steps, exports, and ranges of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyrage import RecipientError, x25519

from app import ids
from app.domain.base_model import BaseModelInfo
from app.domain.ops import AdamParams, LoraSpec
from app.domain.records import Checkpoint, Model
from app.errors import BadRequest
from app.settings import BaseModelSettings

GROUPS = ("attn", "mlp", "unembed")
ROLE = "model_role"
POLICY, CRITIC = "policy", "critic"

FORMATS = ("peft", "huggingface")
METADATA_KEY = "export_format"


def check_lora(lora: LoraSpec, max_rank: int, info: BaseModelInfo) -> None:
    """Requires an allowed rank, and at least one group to train."""
    in_range("lora_config.rank", lora.rank, 1, max_rank)
    asked = [group for group in GROUPS if getattr(lora, f"train_{group}")]
    if not set(asked) & set(info.trainable_groups):
        wanted = ", ".join(f"train_{group}" for group in info.trainable_groups)
        raise BadRequest(f"lora_config leaves nothing to train: set at least one of {wanted} for {info.name}")


def check_sampled(lora: LoraSpec, trainer: BaseModelInfo, sampler: BaseModelInfo | None) -> None:
    """Rejects an adapter that the sampler, if there is one, could not apply, before the adapter is trained."""
    trained = [group for group in trainer.trainable_groups if getattr(lora, f"train_{group}")]
    for group in trained:
        if sampler is not None and group not in sampler.trainable_groups:
            raise BadRequest(
                f"the sampler of {sampler.name} cannot apply an adapter to these layers: set train_{group} to false"
            )


def asked_role(asked: Mapping[str, Any]) -> str | None:
    """POLICY or CRITIC, from the field model_role or from model_role in user_metadata (the SDK can send only the
    latter); None if neither is given."""
    given = [role for role in (asked.get(ROLE), asked["user_metadata"].get(ROLE)) if role is not None]
    for role in given:
        if role not in (POLICY, CRITIC):
            raise BadRequest(f"{ROLE} {str(role)[:80]!r} is unknown; it can be {POLICY} or {CRITIC}")
    if len(set(given)) > 1:
        raise BadRequest(
            f"{ROLE} is {given[0]}, but {given[1]} in user_metadata; send only one of them, or the same value in both"
        )
    return given[0] if given else None


def check_sampled_role(what: str, *, critic: bool) -> None:
    """Rejects a critic: only a policy can be sampled from."""
    if critic:
        raise BadRequest(
            f"{what} is a critic, which returns values and cannot be sampled from; save it with save_weights"
        )


def check_sampleable(base: BaseModelSettings, *, full: bool) -> None:
    """Raises BadRequest for a fully fine-tuned model if no sampler of this server loads full weights."""
    if full and base.full_sampler is None:
        raise BadRequest(
            "this model was fine-tuned in full, and this server has no samplers for such models: save it with "
            "save_weights_external, download it and serve that folder, or have the server started with samplers for "
            "it (base_models.full_sampler in its settings)"
        )


def check_optimizer(config: Mapping[str, Any] | None) -> None:
    """Rejects every optimizer except AdamW."""
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise BadRequest(f"optimizer {str(kind)[:80]!r} is not supported; use adamw")


def check_adam(params: AdamParams) -> None:
    """Requires finite settings in the ranges of torch.optim.AdamW. An eps of zero would divide by zero on a zero
    gradient."""
    in_range("adam_params.learning_rate", params.learning_rate, 0)
    in_range("adam_params.beta1", params.beta1, 0, 1, open_ends=")")
    in_range("adam_params.beta2", params.beta2, 0, 1, open_ends=")")
    in_range("adam_params.eps", params.eps, 0, open_ends="(")
    in_range("adam_params.weight_decay", params.weight_decay, 0)
    in_range("adam_params.grad_clip_norm", params.grad_clip_norm, 0)


def exports_merged(asked: str | None, model: Model) -> bool:
    """True if an export holds the whole model although only an adapter was trained.

    The format is `asked`, or the value that `model` was created with under METADATA_KEY, since the SDK's call has no
    argument for it, or PEFT. Raises BadRequest if the model cannot be exported in that format.
    """
    form = asked or model.user_metadata.get(METADATA_KEY) or ("huggingface" if model.full else "peft")
    if form not in FORMATS:
        raise BadRequest(f"export format {str(form)[:80]!r} is unknown: use one of {', '.join(FORMATS)}")
    if form == "peft" and model.full:
        raise BadRequest("this model was fine-tuned in full, so it has no PEFT files: export it as huggingface")
    if form == "huggingface" and model.critic and not model.full:
        raise BadRequest("a critic's value head is not part of a Hugging Face causal model: export it as peft")
    return form == "huggingface" and not model.full


def check_recipients(recipients: Sequence[str]) -> tuple[str, ...]:
    """The recipients without repeats, in order, so that a repeated call is the same call. Raises BadRequest for a text
    that is no age public key."""
    for recipient in recipients:
        try:
            x25519.Recipient.from_str(recipient)
        except RecipientError:
            raise BadRequest(
                f"{recipient[:80]!r} is not an age recipient: give a public key such as age-keygen prints (age1...)"
            ) from None
    return tuple(sorted(set(recipients)))


def check_loadable(path: ids.TinkerPath, checkpoint: Checkpoint, optimizer: bool) -> None:
    """Raises BadRequest for a merged model, and for an optimizer state that only a training checkpoint holds."""
    check_adapter(path, checkpoint)
    if optimizer and path.kind != "weights":
        raise BadRequest(
            f"{path} holds no optimizer state: load it without the optimizer state, or load a checkpoint of "
            "save_weights"
        )


def check_adapter(path: ids.TinkerPath, checkpoint: Checkpoint) -> None:
    """Raises BadRequest for a merged model and for encrypted files, because no adapter can be read from them any
    more."""
    if checkpoint.encrypted:
        raise BadRequest(f"{path} is encrypted and can only be downloaded: use a checkpoint that is not encrypted")
    if checkpoint.merged:
        raise BadRequest(f"{path} is a merged model and can only be downloaded: use a checkpoint of its adapter")


def check_same_role(path: ids.TinkerPath, checkpoint: Checkpoint, *, critic: bool) -> None:
    """Requires a critic's checkpoint for a critic and a policy's checkpoint for a policy, because their heads
    differ."""
    if checkpoint.critic != critic:
        found, wanted = (CRITIC, POLICY) if checkpoint.critic else (POLICY, CRITIC)
        raise BadRequest(
            f"{path} is a checkpoint of a {found}, but this model is a {wanted}, which has another head; load a "
            f"checkpoint of a {wanted}"
        )


def check_same_kind(path: ids.TinkerPath, checkpoint: Checkpoint, *, full: bool) -> None:
    """Requires a LoRA adapter's checkpoint for an adapter, and a full checkpoint for full fine-tuning."""
    if checkpoint.full != full:
        kinds = {True: "all weights of a model", False: "a LoRA adapter"}
        raise BadRequest(
            f"{path} holds {kinds[checkpoint.full]}, but this model trains {kinds[full]}; create a new model from the "
            "checkpoint instead"
        )


def in_range(name: str, value: float, low: float, high: float = math.inf, *, open_ends: str = "") -> None:
    """Requires `low` <= `value` <= `high`. `open_ends` holds "(" if `low` itself is refused and ")" if `high` is."""
    above = value > low if "(" in open_ends else value >= low
    below = value < high if ")" in open_ends else value <= high
    finite = isinstance(value, int) or math.isfinite(value)  # isfinite overflows on an int beyond 1e308
    if not (finite and above and below):
        raise BadRequest(f"{name} {_short(value)} is out of range: it must be {_words(low, high, open_ends)}")


def _short(value: float) -> str:
    return f"{value!r:.40}"


def _words(low: float, high: float, open_ends: str) -> str:
    lower = f"above {low}" if "(" in open_ends else f"at least {low}"
    if high == math.inf:
        return f"finite and {lower}"
    return f"{lower} and {'below' if ')' in open_ends else 'at most'} {high}"
