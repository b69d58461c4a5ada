"""The Messages API for Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from flask import Response
from marshmallow import fields, validate

from app.api import errors
from app.api.base import current_caller, large, make_blueprint, needs, services
from app.api.chat.base import MAX_MESSAGES, MAX_TOOLS, Counted, Ignored, Nullable, Sampled, Unsupported, answered, gone
from app.api.examples import COUNT, MESSAGE
from app.api.schemas import FirstWrong, identifier, nested
from app.services.anthropic.answers import MessageForm
from app.services.anthropic.requests import chat_of, sampling_of, thinks
from app.services.openai.generation import TokenOptions
from app.services.sampling import MAX_STOPS

blueprint = make_blueprint(
    "anthropic",
    "Anthropic",
    prefix=f"{errors.ANTHROPIC}/api/v1",
    parameters={"model": "an id from the list of models"},
)

EARLIER_PREFIX = f"{errors.ANTHROPIC}/v1"
"""The same routes are below it, for clients that were set up before the prefix was that of the hosted service."""

# Claude Code sends it with every message.
_KEEPS_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}


class Turn(Counted):
    role = fields.String(required=True, validate=validate.OneOf(["user", "assistant", "system"]))
    content = fields.Raw(required=True)


class Tool(Nullable):
    name = fields.String(required=True, validate=validate.Length(1))
    description = fields.String(load_default="")
    input_schema = fields.Dict(required=True)
    type = fields.String(validate=validate.OneOf(["custom"], error="Must be 'custom': the server runs no tools."))
    strict = Unsupported(False)
    defer_loading = Unsupported(False)
    input_examples = Unsupported([])
    allowed_callers = Unsupported(["direct"])
    cache_control = Ignored()
    eager_input_streaming = Ignored()


class ToolChoice(Nullable):
    type = fields.String(
        required=True,
        validate=validate.OneOf(
            ["auto", "none"], error="Must be 'auto' or 'none': this server cannot force the model to call a tool."
        ),
    )
    disable_parallel_tool_use = fields.Boolean(load_default=False)


class Thinking(Nullable):
    type = fields.String(required=True, validate=validate.OneOf(["enabled", "adaptive", "disabled"]))
    budget_tokens = Ignored()
    display = Unsupported("summarized")


class OutputFormat(Nullable):
    type = fields.String(required=True, validate=validate.OneOf(["json_schema"]))
    schema = fields.Dict(required=True)


class OutputConfig(Nullable):
    format = fields.Nested(OutputFormat, load_default=None)
    effort = Ignored()


class Conversation(Nullable):
    """The fields that make the prompt."""

    model = identifier()
    messages = FirstWrong(fields.Nested(Turn), MAX_MESSAGES, required=True, validate=validate.Length(1))
    system = fields.Raw(load_default=None)
    tools = FirstWrong(fields.Nested(Tool), MAX_TOOLS, load_default=list)
    tool_choice = nested(ToolChoice, {"type": "auto"})
    thinking = nested(Thinking, {"type": "disabled"})
    output_config = nested(OutputConfig)
    output_format = Unsupported()
    context_management = Unsupported({}, {"edits": []}, {"edits": [_KEEPS_THOUGHTS]})
    mcp_servers = Unsupported([])
    cache_control = Ignored()
    speed = Ignored()


class CreateMessage(Conversation, Sampled):
    max_tokens = fields.Integer(strict=True, required=True, validate=validate.Range(1))
    top_k = fields.Integer(strict=True, load_default=-1, validate=validate.Range(1))
    stop_sequences = FirstWrong(fields.String(validate=validate.Length(1)), MAX_STOPS, load_default=list)
    container = Unsupported()
    metadata = Ignored()
    service_tier = Ignored()
    inference_geo = Ignored()
    diagnostics = Ignored()
    user_profile_id = Ignored()


@blueprint.route("/messages", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(CreateMessage(), example=MESSAGE.request, error_status_code=400)
@blueprint.response(
    200, description="A message; with `stream`, its events as server-sent events", example=MESSAGE.response
)
def messages(asked: dict[str, Any]) -> Response | dict[str, Any]:
    """Answer in a conversation, by the model's chat template."""
    ids = asked["return_token_ids"]
    form, options = partial(MessageForm, thinks=thinks(asked), ids=ids), TokenOptions(ids=ids)
    answer = services().openai.converse(current_caller(), chat_of(asked), sampling_of(asked), form, gone(), options)
    return answered(answer, _event, stream=asked["stream"])


@blueprint.route("/messages/count_tokens", methods=["POST"])
@large
@blueprint.arguments(Conversation(), example=COUNT.request, error_status_code=400)
@blueprint.response(200, description="The number of the prompt's tokens", example=COUNT.response)
def count_tokens(asked: dict[str, Any]) -> dict[str, int]:
    """Count the tokens of a conversation."""
    return {"input_tokens": services().openai.count(current_caller(), chat_of(asked))}


@blueprint.route("/models", methods=["GET"])
@blueprint.response(200, description="A list of model objects")
def models() -> dict[str, Any]:
    """List the base models that can be sampled now, and the caller's sampler checkpoints."""
    found = [_model(model) for model in services().openai.models(current_caller())]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"data": found, "has_more": False, **ends}


@blueprint.route("/models/<path:model>", methods=["GET"])
@blueprint.response(200, description="A model object")
def retrieve_model(model: str) -> dict[str, Any]:
    """Return one model by its id."""
    return _model(services().openai.model(current_caller(), model))


def _model(found: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(found["created"], UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": found["id"],
        "display_name": found["id"],
        "created_at": created,
        "lifecycle": "active",
    }


def _event(content: Mapping[str, Any]) -> str:
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n"
