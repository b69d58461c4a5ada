"""Sampling sessions, and asample in them."""

from __future__ import annotations

from typing import Any

from marshmallow import fields, validate

from app.api.base import current_caller, large, make_blueprint, needs, services
from app.api.examples import CREATE_SAMPLING_SESSION, SAMPLE
from app.api.futures import SamplePromise
from app.api.schemas import SdkSchema, counter, identifier, nested
from app.ids import MAX_NUMBER

blueprint = make_blueprint(
    "sampling", "Sampling", parameters={"sampler_id": "the sampling_session_id of create_sampling_session"}
)


class CreateSamplingSession(SdkSchema):
    """A request for a sampling session."""

    session_id = identifier()
    sampling_session_seq_id = counter(0, MAX_NUMBER)
    model_path = fields.String(allow_none=True)
    base_model = fields.String(allow_none=True)


class SamplingSessionCreated(SdkSchema):
    sampling_session_id = fields.String()


@blueprint.route("/create_sampling_session", methods=["POST"])
@needs("sample")
@blueprint.arguments(CreateSamplingSession(), example=CREATE_SAMPLING_SESSION.request)
@blueprint.response(200, SamplingSessionCreated, example=CREATE_SAMPLING_SESSION.response)
def create_sampling_session(asked: dict[str, Any]) -> dict[str, str]:
    """Create a sampler for a base model or a checkpoint."""
    return {"sampling_session_id": services().sampling.create_session(current_caller(), asked)}


class JoinSamplingSession(SdkSchema):
    sampling_session_id = identifier()


class SamplingSessionJoined(SdkSchema):
    client_counter = fields.Integer()


@blueprint.route("/join_sampling_session", methods=["POST"])
@needs("sample")
@blueprint.arguments(JoinSamplingSession())
@blueprint.response(200, SamplingSessionJoined)
def join_sampling_session(asked: dict[str, Any]) -> dict[str, int]:
    """Return a number n for one more client of a sampler. The client's seq_ids start at n * 10^9."""
    return {"client_counter": services().sampling.join(asked["sampling_session_id"], current_caller())}


class Sampler(SdkSchema):
    sampler_id = fields.String()
    base_model = fields.String()
    model_path = fields.String()


@blueprint.route("/samplers/<sampler_id>", methods=["GET"])
@blueprint.response(200, Sampler)
def get_sampler(sampler_id: str) -> dict[str, str]:
    """Return the base model and the checkpoint of a sampler."""
    return services().sampling.describe(sampler_id, current_caller())


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
    sampling_params = nested(SamplingParams)
    prompt_logprobs = fields.Boolean(load_default=False, allow_none=True)
    topk_prompt_logprobs = fields.Integer(strict=True, load_default=None, allow_none=True)
    topk_sample_logprobs = fields.Integer(strict=True, load_default=None, allow_none=True)
    prompt_alt_tokens_k = fields.Integer(strict=True, load_default=None, allow_none=True)
    prompt_logprobs_last_n = fields.Integer(strict=True, load_default=None, allow_none=True)
    target_prompt_logprobs = fields.Raw(load_default=None, allow_none=True)
    record_stability_info = fields.Boolean(load_default=False, allow_none=True)


@blueprint.route("/asample", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(Sample(), example=SAMPLE.request)
@blueprint.response(200, SamplePromise, example=SAMPLE.response)
def asample(asked: dict[str, Any]) -> dict[str, Any]:
    """Sample sequences, or only score a prompt."""
    return services().sampling.sample(current_caller(), asked)
