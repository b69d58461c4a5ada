"""Checks of training calls: models, batches, optimizer steps, checkpoints, exports, and ranges of numbers. A batch
takes a few numpy calls; the faulty datum is searched for only on failure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app import ids
from app.domain.limits import LONGEST_TTL_S, SHORTEST_TTL_S
from app.domain.losses import CLIP_HIGH, CLIP_LOW, LOSSES, NOT_OFFERED, CustomLoss, LossSpec, losses_of
from app.domain.ops import AdamParams, Batch, ForwardBackward, LoraSpec, Ragged
from app.domain.records import BaseModelInfo, Checkpoint, Model
from app.errors import BadRequest
from app.settings import BaseModelSettings
from app.wire.recipients import age_recipient

GROUPS = ("attn", "mlp", "unembed")
ROLE = "model_role"
POLICY, CRITIC = "policy", "critic"
FORMATS = ("peft", "huggingface")
METADATA_KEY = "export_format"

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def check_lora(lora: LoraSpec, max_rank: int, info: BaseModelInfo) -> None:
    """Requires an allowed rank, at least one group to train, and no adapter that would leave MLPs or experts out."""
    if lora.rank > max_rank:
        raise BadRequest(
            f"lora_config.rank {_short(lora.rank)} is out of range: the maximum LoRA rank is {max_rank} for {info.name}"
        )
    in_range("lora_config.rank", lora.rank, 1, max_rank)
    if lora.train_mlp and "mlp" not in info.trainable_groups:
        raise BadRequest(f"LoRA does not cover the MLP layers or experts of {info.name} yet: set train_mlp to false")
    asked = [group for group in GROUPS if getattr(lora, f"train_{group}")]
    if not set(asked) & set(info.trainable_groups):
        wanted = ", ".join(f"train_{group}" for group in info.trainable_groups)
        raise BadRequest(f"lora_config leaves nothing to train: set at least one of {wanted} for {info.name}")


def check_sampled(lora: LoraSpec, trainer: BaseModelInfo | None, sampler: BaseModelInfo | None) -> None:
    """Rejects an adapter that the sampler could not apply. Does nothing before both workers are known: a sampler
    itself rejects such an adapter, but only as it loads it."""
    if trainer is None or sampler is None:
        return
    for group in trainer.trainable_groups:
        if getattr(lora, f"train_{group}") and group not in sampler.trainable_groups:
            raise BadRequest(
                f"the sampler of {sampler.name} cannot apply an adapter to these layers: set train_{group} to false, "
                'or have the server started with sampler.backend = "transformers"'
            )


def asked_role(asked: Mapping[str, Any]) -> str | None:
    """POLICY or CRITIC, from the field model_role or from model_role in user_metadata (the SDK can send only the
    latter); None if neither is given. Raises BadRequest for another role, and for two that differ."""
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


def check_optimizer_params(params: Mapping[str, Any] | None) -> None:
    """Rejects the parameters of another optimizer, and AdamW's, whose fields the SDK defines only in adam_params."""
    check_optimizer(params)
    if params is not None:
        raise BadRequest("optimizer_params cannot have the type adamw: send AdamW's values in adam_params")


def check_adam(params: AdamParams) -> None:
    """Requires settings in the ranges of torch.optim.AdamW, as far as fp32 has them: the optimizer computes in it. An
    eps of zero would divide by zero on a zero gradient."""
    in_range("adam_params.learning_rate", params.learning_rate, 0, _LARGEST)
    in_range("adam_params.beta1", params.beta1, 0, 1, open_ends=")")
    in_range("adam_params.beta2", params.beta2, 0, 1, open_ends=")")
    in_range("adam_params.eps", params.eps, _SMALLEST)
    in_range("adam_params.weight_decay", params.weight_decay, 0, _LARGEST)
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
    that is no public key of age or SSH."""
    for recipient in recipients:
        try:
            age_recipient(recipient)
        except ValueError as error:
            raise BadRequest(
                f"{recipient[:80]!r} is not an age recipient ({error}): give a public key such as age-keygen prints "
                "(age1...), or one of SSH (ssh-ed25519 ..., ssh-rsa ...)"
            ) from None
    return tuple(sorted(set(recipients)))


def check_ttl(ttl_seconds: int | None) -> None:
    """Accepts one hour to ten years; None keeps the checkpoint for ever. Raises BadRequest."""
    if ttl_seconds is not None:
        in_range("ttl_seconds", ttl_seconds, SHORTEST_TTL_S, LONGEST_TTL_S)


def check_loadable(path: ids.TinkerPath, checkpoint: Checkpoint, optimizer: bool) -> None:
    """Raises BadRequest as `check_adapter` does, and for the optimizer state of a checkpoint that has none."""
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


def check_forward_backward(op: ForwardBackward, info: BaseModelInfo, *, critic: bool) -> None:
    """Raises BadRequest when `op` cannot run on this base model, with a policy or a `critic`."""
    spec = check_loss(op.loss_fn, critic=critic)
    check_reads_images(op.batch.images, info)
    check_lengths(op.batch, info.max_context)
    check_tokens("model_input", op.batch.tokens, info.vocab_size)
    if op.custom is not None:
        check_custom_inputs(op.batch, op.custom)
    elif spec.critic:
        check_critic_inputs(op, spec)
    else:
        check_inputs(op.batch, op.loss_fn, spec)
    if not spec.critic:
        check_targets(op.batch.inputs["target_tokens"], info.vocab_size)
    check_finite(op.batch)
    check_loss_config(op.loss_config, op.loss_fn, spec)
    if op.custom is None:
        check_clip(op.batch, {**spec.config, **op.loss_config})
        check_ratio_mask(op.batch)


def check_loss(loss_fn: str, *, critic: bool) -> LossSpec:
    """The loss with that name, for a policy or for a critic. Raises BadRequest."""
    if loss_fn in NOT_OFFERED:
        raise BadRequest(f"loss_fn {loss_fn} is not offered: {NOT_OFFERED[loss_fn]}")
    if loss_fn not in LOSSES:
        raise BadRequest(f"loss_fn {loss_fn[:80]!r} is unknown; the loss functions are {', '.join(LOSSES)}")
    spec = LOSSES[loss_fn]
    if spec.critic != critic:
        role, other = ("critic", "policy") if critic else ("policy", "critic")
        raise BadRequest(
            f"loss_fn {loss_fn} needs a {other}, but this model is a {role}; a {role} supports {losses_of(critic)}"
        )
    return spec


def check_lengths(batch: Batch, max_context: int) -> None:
    """Requires at least one datum, each of 1..max_context tokens."""
    if not len(batch):
        raise BadRequest("data is empty: send at least one datum")
    for i, (length,) in enumerate(batch.tokens.shapes):
        if not 1 <= length <= max_context:
            raise BadRequest(
                f"datum {i}: model_input has {length} tokens; the model takes 1 to {max_context} "
                "(the cookbook's option is max_length)"
            )


def check_reads_images(images: Sequence[object], info: BaseModelInfo) -> None:
    """Requires a base model that reads images, if there are any."""
    if images and not info.reads_images:
        raise BadRequest(
            f"{info.name} is served without images here: send text alone, or use a base model that reads them "
            "(docs/images.md says which do, in training and in sampling)"
        )


def check_tokens(key: str, column: Ragged, vocab_size: int) -> None:
    """Requires every id in 0..vocab_size-1."""
    values = column.values
    if values.size and (values.min() < 0 or values.max() >= vocab_size):
        index = int(np.argmax((values < 0) | (values >= vocab_size)))
        raise BadRequest(f"{_place(column, index, key)}: token {values[index]} is not in 0..{vocab_size - 1}")


def check_targets(targets: Ragged, vocab_size: int) -> None:
    """Requires ids of the vocabulary, and at most vocab_size of them at each position."""
    check_tokens("target_tokens", targets, vocab_size)
    for i, (_, *width) in enumerate(targets.shapes):
        if width and width[0] > vocab_size:
            raise BadRequest(
                f"datum {i}: target_tokens has K = {width[0]} targets a position, more than the {vocab_size} tokens of "
                "the vocabulary; send each at most once"
            )


def check_inputs(batch: Batch, loss_fn: str, spec: LossSpec) -> None:
    """Requires every input of the loss. All inputs are as long as the tokens and, except for wide losses,
    one-dimensional."""
    _check_there(batch, loss_fn, spec)
    targets = batch.inputs["target_tokens"].shapes
    for i, ((length,), shape) in enumerate(zip(batch.tokens.shapes, targets, strict=True)):
        if shape[:1] != (length,) or len(shape) > (2 if spec.wide else 1):
            allowed = f"[{length}] or [{length}, K]" if spec.wide else f"[{length}]"
            raise BadRequest(f"datum {i}: target_tokens has shape {list(shape)}; {loss_fn} needs {allowed}")
    for name, column in batch.inputs.items():
        _check_same_shapes(name, column, targets, "target_tokens")


def check_critic_inputs(op: ForwardBackward, spec: LossSpec) -> None:
    """Requires every input as long as the tokens; a forward-only call, which returns only values, may leave inputs
    out."""
    if not op.forward_only:
        _check_there(op.batch, op.loss_fn, spec)
    for name, column in op.batch.inputs.items():
        _check_same_shapes(name, column, op.batch.tokens.shapes, "model_input")


def check_finite(batch: Batch) -> None:
    """Rejects NaN and infinity in any input."""
    for name, column in batch.inputs.items():
        if column.values.dtype.kind == "f" and not np.isfinite(column.values).all():
            index = int(np.argmin(np.isfinite(column.values)))
            raise BadRequest(f"{_place(column, index, name)}: {column.values[index]} is not a finite number")


def check_loss_config(config: Mapping[str, float], loss_fn: str, spec: LossSpec) -> None:
    """Accepts only settings of this loss, none negative, each a number that fp32 can hold."""
    for key, value in config.items():
        if key not in spec.config:
            known = ", ".join(spec.config) or "none"
            raise BadRequest(f"loss_fn_config {key[:80]!r} is unknown to {loss_fn}; it takes {known}")
        if not 0 <= value <= _LARGEST:
            raise BadRequest(f"loss_fn_config {key} {value!r} is not in 0..{_LARGEST:.4g}")


def check_clip(batch: Batch, settings: Mapping[str, float]) -> None:
    """Requires ordered clip thresholds at every token, none below 0. An input takes precedence over the setting."""
    given = [name for name in (CLIP_LOW, CLIP_HIGH) if name in batch.inputs]
    low, high = (_thresholds(batch, settings, name) for name in (CLIP_LOW, CLIP_HIGH))
    low, high = np.broadcast_arrays(low, high)
    wrong = (low > high) | (low < 0)
    if wrong.any():
        index = int(np.argmax(wrong))
        place = _place(batch.inputs[given[0]], index, given[0]) if given else "loss_fn_config"
        raise BadRequest(
            f"{place}: {CLIP_LOW} {low[index]:g} is not in 0..{high[index]:g}, the {CLIP_HIGH} of this position"
        )


def check_ratio_mask(batch: Batch) -> None:
    """Requires at least one marked token in every datum, because gspo's mean over no tokens is undefined."""
    column = batch.inputs.get("sequence_ratio_mask")
    for i, mask in enumerate(column or ()):
        if not mask.any():
            raise BadRequest(
                f"datum {i}: sequence_ratio_mask is 0 everywhere, so no token counts for the sequence ratio; mark the "
                "sampled tokens, or leave the datum out"
            )


def _thresholds(batch: Batch, settings: Mapping[str, float], name: str) -> np.ndarray:
    """Thresholds in fp32, as the loss computes with them: one for each token, or a single one."""
    return batch.inputs[name].values if name in batch.inputs else np.array([settings.get(name, 0.0)], np.float32)


def _check_there(batch: Batch, loss_fn: str, spec: LossSpec) -> None:
    for name in spec.inputs:
        if name not in batch.inputs:
            raise BadRequest(f"datum 0: {name} is missing; {loss_fn} needs it in every datum's loss_fn_inputs")


def _check_same_shapes(name: str, column: Ragged, wanted: tuple[tuple[int, ...], ...], like: str) -> None:
    if column.shapes == wanted:
        return
    i = next(i for i, (shape, other) in enumerate(zip(column.shapes, wanted, strict=True)) if shape != other)
    raise BadRequest(f"datum {i}: {name} has shape {list(column.shapes[i])}, but {like} has {list(wanted[i])}")


def _place(column: Ragged, index: int, key: str) -> str:
    """The datum and the position of a flat index, as text."""
    offsets = column.offsets()
    datum = bisect_right(offsets, index) - 1
    return f"datum {datum}: {key} at position {index - offsets[datum]}"


def check_custom_inputs(batch: Batch, loss: CustomLoss) -> None:
    """Requires every input that the loss names, at its rank, and targets as long as the tokens.

    Sizes are checked by the loss itself, as on the client: a loss may slice, or read a column of another length.
    """
    for name, rank in loss.columns.items():
        if name not in batch.inputs:
            raise BadRequest(f"datum 0: {name} is missing; the loss {loss.name} needs it in every datum")
        for i, shape in enumerate(batch.inputs[name].shapes):
            if len(shape) != rank:
                raise BadRequest(
                    f"datum {i}: {name} has shape {list(shape)}, but the loss {loss.name} takes rank {rank}"
                )
    shapes = batch.inputs["target_tokens"].shapes
    for i, ((length,), target) in enumerate(zip(batch.tokens.shapes, shapes, strict=True)):
        if target[0] != length:
            raise BadRequest(f"datum {i}: target_tokens has shape {list(target)}, but model_input has {length} tokens")
