"""Checks of a batch against what a custom loss says it reads."""

from __future__ import annotations

from app.domain.batch import Batch
from app.domain.custom_losses import CustomLoss
from app.errors import BadRequest


def check_custom_inputs(batch: Batch, loss: CustomLoss) -> None:
    """Every input the loss names is there at its rank, and the targets are as long as the tokens.

    Sizes are the loss's own business, as they are on the client: it may slice, or read a column of another length.
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
