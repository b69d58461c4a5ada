"""Sampling sessions and asample."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.bodies import large
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.futures import SamplePromise
from app.schemas.sampling import (
    CreateSamplingSession,
    JoinSamplingSession,
    Sample,
    Sampler,
    SamplingSessionCreated,
    SamplingSessionJoined,
)

blueprint = make("sampling", "Sampling")


@blueprint.route("/create_sampling_session", methods=["POST"])
@needs("sample")
@blueprint.arguments(CreateSamplingSession())
@blueprint.response(200, SamplingSessionCreated)
def create_sampling_session(asked: dict[str, Any]) -> dict[str, str]:
    """A sampler for a base model or a checkpoint."""
    return {"sampling_session_id": services().sampling.create_session(current_caller(), asked)}


@blueprint.route("/join_sampling_session", methods=["POST"])
@needs("sample")
@blueprint.arguments(JoinSamplingSession())
@blueprint.response(200, SamplingSessionJoined)
def join_sampling_session(asked: dict[str, Any]) -> dict[str, int]:
    """A number for one more client of a sampler, whose seq_ids start at 10^9 times it."""
    return {"client_counter": services().sampling.join(asked["sampling_session_id"], current_caller())}


@blueprint.route("/samplers/<sampler_id>", methods=["GET"])
@blueprint.response(200, Sampler)
def get_sampler(sampler_id: str) -> dict[str, str]:
    """What a sampler samples from."""
    return services().sampling.describe(sampler_id, current_caller())


@blueprint.route("/asample", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(Sample())
@blueprint.response(200, SamplePromise)
def asample(asked: dict[str, Any]) -> dict[str, Any]:
    """Sample sequences, or only score a prompt."""
    return services().sampling.sample(current_caller(), asked)
