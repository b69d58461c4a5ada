"""optim_step; forward_backward is protobuf and lives in app/wire."""

from __future__ import annotations

from marshmallow import fields

from app.domain.ops import AdamParams
from app.schemas.base import SdkSchema, counter, identifier

_DEFAULTS = AdamParams()


class Adam(SdkSchema):
    learning_rate = fields.Float(load_default=_DEFAULTS.learning_rate)
    beta1 = fields.Float(load_default=_DEFAULTS.beta1)
    beta2 = fields.Float(load_default=_DEFAULTS.beta2)
    eps = fields.Float(load_default=_DEFAULTS.eps)
    weight_decay = fields.Float(load_default=_DEFAULTS.weight_decay)
    grad_clip_norm = fields.Float(load_default=_DEFAULTS.grad_clip_norm)


class OptimStep(SdkSchema):
    model_id = identifier()
    seq_id = counter(1)
    adam_params = fields.Nested(Adam, load_default=lambda: Adam().load({}))
    optimizer_params = fields.Dict(
        keys=fields.String(), metadata={"description": "other optimizers than AdamW, none of which is supported"}
    )
