"""Sampling sessions and asample."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, counter, identifier


class CreateSamplingSession(SdkSchema):
    session_id = identifier()
    sampling_session_seq_id = counter(0, 10**9)
    model_path = fields.String(allow_none=True)
    base_model = fields.String(allow_none=True)


class SamplingSessionCreated(SdkSchema):
    sampling_session_id = fields.String()


class JoinSamplingSession(SdkSchema):
    sampling_session_id = identifier()


class SamplingSessionJoined(SdkSchema):
    client_counter = fields.Integer()


class Sampler(SdkSchema):
    sampler_id = fields.String()
    base_model = fields.String()
    model_path = fields.String()


class Prompt(SdkSchema):
    chunks = fields.List(fields.Raw(), required=True)


class SamplingParams(SdkSchema):
    max_tokens = fields.Integer(strict=True, allow_none=True)
    seed = fields.Integer(strict=True, allow_none=True, validate=validate.Range(0, 2**63 - 1))
    stop = fields.Raw(allow_none=True)
    temperature = fields.Float(load_default=1.0)
    top_k = fields.Integer(strict=True, load_default=-1)
    top_p = fields.Float(load_default=1.0)


class Sample(SdkSchema):
    sampling_session_id = identifier()
    seq_id = counter(0, 2**63 - 1)
    num_samples = fields.Integer(strict=True, load_default=1)
    prompt = fields.Nested(Prompt, required=True)
    sampling_params = fields.Nested(SamplingParams, load_default=lambda: SamplingParams().load({}))
    prompt_logprobs = fields.Boolean(load_default=False, allow_none=True)
    topk_prompt_logprobs = fields.Integer(strict=True, load_default=None, allow_none=True)
    topk_sample_logprobs = fields.Integer(strict=True, load_default=None, allow_none=True)
    prompt_alt_tokens_k = fields.Integer(strict=True, load_default=None, allow_none=True)
    prompt_logprobs_last_n = fields.Integer(strict=True, load_default=None, allow_none=True)
    target_prompt_logprobs = fields.Raw(load_default=None, allow_none=True)
