"""Checks of a forward_backward: a few numpy calls for the whole batch. The faulty datum is searched for only on
failure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from app.domain.base_model import BaseModelInfo
from app.domain.batch import Batch, Ragged
from app.domain.custom_losses import CustomLoss
from app.domain.losses import CLIP_HIGH, CLIP_LOW, LOSSES, NOT_OFFERED, LossSpec, losses_of
from app.domain.ops import ForwardBackward
from app.errors import BadRequest

_LARGEST = float(np.finfo(np.float32).max)


def check_forward_backward(op: ForwardBackward, info: BaseModelInfo, *, critic: bool) -> None:
    """Raises BadRequest when `op` cannot run on this base model, with a policy or a `critic`."""
    spec = check_loss(op.loss_fn, critic=critic)
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
            raise BadRequest(f"datum {i}: model_input has {length} tokens; the model takes 1 to {max_context}")


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
