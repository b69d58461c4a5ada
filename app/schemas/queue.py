"""What waits."""

from __future__ import annotations

from marshmallow import RAISE, Schema, fields

from app.schemas.lists import Cursor, Paged


class AskedQueue(Paged):
    """Ours alone, so what it does not know is a mistake."""

    class Meta:
        unknown = RAISE


class WaitingCall(Schema):
    request_id = fields.String()
    kind = fields.String(metadata={"description": "create_model, forward_backward, ..., sample"})
    model_id = fields.String(metadata={"description": "of a training call"})
    sampling_session_id = fields.String(metadata={"description": "of a sampling request"})
    seq_id = fields.Integer()
    waited_s = fields.Float(metadata={"description": "since it was admitted"})
    state = fields.String(metadata={"description": "running, waiting, or paused_capacity: nobody runs it just now"})
    position = fields.Integer(metadata={"description": "1 is the next to run, as turns go now"})
    estimated_start_s = fields.Float(
        allow_none=True, metadata={"description": "from now, at the workers' pace; null while that is not known"}
    )
    reason = fields.String(metadata={"description": "what runs before it, or why nothing does"})


class Queue(Schema):
    calls = fields.List(fields.Nested(WaitingCall))
    cursor = fields.Nested(Cursor)
