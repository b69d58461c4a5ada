"""What the SDK asks before anything else, and its telemetry."""

from __future__ import annotations

from marshmallow import fields

from app.schemas.base import SdkSchema


class ClientConfig(SdkSchema):
    """Advanced features of the SDK, all off but those served here.

    Three of them later SDKs have for good: batches as protobuf (0.20 to 0.24), the same for forward ones, and models
    made of a checkpoint in one call (0.24 to 0.37).
    """

    pjwt_auth_enabled = fields.Boolean()
    parallel_fwdbwd_chunks = fields.Boolean()
    proto_write_fwdbwd = fields.Boolean()
    proto_compress_fwdbwd = fields.Boolean()
    fwd_via_fwdbwd = fields.Boolean()
    create_model_via_load_weights = fields.Boolean()
    sample_use_retrieve_futures = fields.Boolean()
    custom_loss_server_side = fields.Boolean()
    sample_join_sampling_session = fields.Boolean()
    sample_max_concurrent_requests = fields.Integer()
    use_pyqwest_transport = fields.Boolean()


class DynamicConfig(SdkSchema):
    sample_cancel_enabled = fields.Boolean()


class TelemetryAnswer(SdkSchema):
    status = fields.String()


class SupportedModel(SdkSchema):
    model_name = fields.String()
    max_context_length = fields.Integer(allow_none=True)
    trainable = fields.Boolean()
    sampleable = fields.Boolean()


class ServerCapabilities(SdkSchema):
    supported_models = fields.List(fields.Nested(SupportedModel))


class Health(SdkSchema):
    status = fields.String()
