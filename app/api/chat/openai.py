"""Completions and chats for OpenAI's clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flask import Response
from marshmallow import ValidationError, fields, validate, validates_schema

from app.api import errors
from app.api.base import current_caller, large, make_blueprint, needs, services
from app.api.chat.base import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Counted,
    Ignored,
    Nullable,
    Sampled,
    Unsupported,
    answered,
    gone,
)
from app.api.examples import CHAT, COMPLETION
from app.api.schemas import FirstWrong, nested
from app.services.openai.chat_templates import RENDERED
from app.services.openai.requests import EFFORTS, Effort, is_effort
from app.services.openai.service import Answer

blueprint = make_blueprint(
    "openai",
    "OpenAI",
    prefix=errors.OPENAI,
    parameters={"model": "an id from the list of models"},
)
_DONE = "data: [DONE]\n\n"

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_TOP = 20
# Of chat_template_kwargs.
MAX_VARIABLES = 20
MAX_VARIABLE_NAME = 64
MAX_VARIABLE_TEXT = 1000
MAX_VARIABLE_NUMBER = 10_000


class StreamOptions(Counted):
    include_usage = fields.Boolean(load_default=False)
    include_obfuscation = Ignored()


class Request(Sampled):
    """The fields that completions and chat completions share."""

    n = fields.Integer(strict=True, load_default=1, validate=validate.Range(1, MAX_CHOICES))
    stop = fields.Raw(load_default=None)
    stream_options = nested(StreamOptions)
    top_k = fields.Integer(strict=True, load_default=-1, validate=validate.Range(-1))
    min_p = Unsupported(0)
    frequency_penalty = Unsupported(0)
    presence_penalty = Unsupported(0)
    repetition_penalty = Unsupported(1)
    logit_bias = Unsupported({})
    user = Ignored()
    metadata = Ignored()
    store = Ignored()
    service_tier = Ignored()
    safety_identifier = Ignored()
    prompt_cache_key = Ignored()
    prompt_cache_retention = Ignored()

    @validates_schema
    def check_stop(self, data: Mapping[str, Any], **_: Any) -> None:
        stop = data["stop"]
        if not (stop is None or stop == [] or isinstance(stop, str) or _all(stop, str)):
            raise ValidationError("Must be a string or a list of strings.", "stop")


class Completion(Request):
    prompt = fields.Raw(required=True)
    max_tokens = fields.Integer(strict=True, load_default=16, validate=validate.Range(0))
    logprobs = fields.Integer(strict=True, load_default=None, validate=validate.Range(0, MAX_TOP))
    echo = fields.Boolean(load_default=False)
    best_of = fields.Integer(strict=True, load_default=None)
    suffix = Unsupported("")

    @validates_schema
    def check_fit(self, data: Mapping[str, Any], **_: Any) -> None:
        if data["best_of"] not in (None, data["n"]):
            raise ValidationError("Must be equal to n; leave it out.", "best_of")
        if data["echo"] and data["return_token_ids"]:
            raise ValidationError("Goes without return_token_ids, which has the prompt in prompt_token_ids.", "echo")
        if data["max_tokens"] == 0 and not data["echo"]:
            raise ValidationError("Must be at least 1, or 0 together with echo.", "max_tokens")

    @validates_schema
    def check_prompt(self, data: Mapping[str, Any], **_: Any) -> None:
        prompt = data["prompt"]
        if isinstance(prompt, str) or _all(prompt, int):
            return
        if not (_all(prompt, str) or (_all(prompt, list) and all(_all(part, int) for part in prompt))):
            raise ValidationError(
                "Must be a string, a list of token ids, a list of strings, or a list of lists of token ids.", "prompt"
            )
        if len(prompt) > MAX_PROMPTS:
            raise ValidationError(f"Has {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed.", "prompt")


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is kind for entry in value)


@blueprint.route("/completions", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(Completion(), example=COMPLETION.request, error_status_code=400)
@blueprint.response(
    200, description="A text_completion; with `stream`, its chunks as server-sent events", example=COMPLETION.response
)
def completions(asked: dict[str, Any]) -> Response | dict[str, Any]:
    """Complete a text or a list of tokens."""
    return _answered(services().openai.complete(current_caller(), asked, gone()), asked)


class Message(Nullable):
    role = fields.String(required=True, validate=validate.OneOf(["system", "developer", "user", "assistant", "tool"]))
    content = fields.Raw(load_default=None, allow_none=True)
    name = fields.String(allow_none=True)
    tool_calls = FirstWrong(fields.Dict(), MAX_TOOLS, allow_none=True)
    tool_call_id = fields.String(allow_none=True)
    reasoning_content = fields.String(allow_none=True)
    reasoning = fields.String(allow_none=True)
    refusal = Ignored(allow_none=True)
    annotations = Ignored(allow_none=True)
    audio = Unsupported()
    function_call = Unsupported()
    # The client's `parse` adds it: the value of the JSON that `content` has.
    parsed = Ignored(allow_none=True)


class NamedFormat(Nullable):
    name = fields.String(required=True, validate=validate.Length(1, 64))
    schema = fields.Dict(required=True)
    description = Ignored()
    strict = Ignored()


class ResponseFormat(Nullable):
    type = fields.String(required=True, validate=validate.OneOf(["text", "json_object", "json_schema"]))
    json_schema = fields.Nested(NamedFormat, load_default=None)

    @validates_schema
    def check_fit(self, data: Mapping[str, Any], **_: Any) -> None:
        if (data["type"] == "json_schema") != (data["json_schema"] is not None):
            raise ValidationError("Goes with the type json_schema, and only with it.", "json_schema")


class EffortField(fields.Field[Any]):
    """A name of EFFORTS, or a number, which becomes a float."""

    def __init__(self) -> None:
        kinds = [{"type": "string", "enum": list(EFFORTS)}, {"type": "number", "minimum": 0, "maximum": 1}]
        super().__init__(load_default=None, metadata={"anyOf": kinds})

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> Effort:
        if not is_effort(value):
            raise ValidationError(f"Must be {', '.join(EFFORTS)} or a number from 0 to 1.")
        return value if isinstance(value, str) else float(value)


class ChatCompletion(Request):
    messages = FirstWrong(fields.Nested(Message), MAX_MESSAGES, required=True, validate=validate.Length(1))
    max_tokens = fields.Integer(strict=True, load_default=None, validate=validate.Range(1))
    max_completion_tokens = fields.Integer(strict=True, load_default=None, validate=validate.Range(1))
    logprobs = fields.Boolean(load_default=False)
    top_logprobs = fields.Integer(strict=True, load_default=0, validate=validate.Range(0, MAX_TOP))
    tools = FirstWrong(fields.Dict(), MAX_TOOLS, load_default=list)
    tool_choice = fields.Raw(load_default="auto")
    parallel_tool_calls = fields.Boolean(load_default=True)
    response_format = nested(ResponseFormat, {"type": "text"})
    chat_template_kwargs = fields.Dict(load_default=dict)
    separate_reasoning = fields.Boolean(load_default=True)
    modalities = Unsupported(["text"])
    functions = Unsupported([])
    function_call = Unsupported("none")
    audio = Unsupported()
    prediction = Unsupported()
    reasoning_effort = EffortField()
    verbosity = Unsupported()
    web_search_options = Unsupported()

    @validates_schema
    def check_fit(self, data: Mapping[str, Any], **_: Any) -> None:
        if data["top_logprobs"] and not data["logprobs"]:
            raise ValidationError("Needs logprobs to be true.", "top_logprobs")
        check_variables(data["chat_template_kwargs"])
        if data["tool_choice"] not in ("auto", "none"):
            raise ValidationError(
                "Must be 'auto' or 'none': this server cannot force the model to call a tool.", "tool_choice"
            )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Limits the variables of a chat template. Their values are single ones, so that the work of a template does not
    depend on them."""
    name = "chat_template_kwargs"
    if len(variables) > MAX_VARIABLES:
        raise ValidationError(f"Has {len(variables)} variables; at most {MAX_VARIABLES} are allowed.", name)
    for key, value in variables.items():
        if not key.isidentifier() or len(key) > MAX_VARIABLE_NAME or key in RENDERED:
            raise ValidationError(f"{key[:MAX_VARIABLE_NAME]!r} is not a variable that a caller can set.", name)
        if isinstance(value, str) and len(value) <= MAX_VARIABLE_TEXT:
            continue
        if not (isinstance(value, int | float) and abs(value) <= MAX_VARIABLE_NUMBER):
            raise ValidationError(
                f"{key} must be true, false, a number up to {MAX_VARIABLE_NUMBER} or a text of at most "
                f"{MAX_VARIABLE_TEXT} characters.",
                name,
            )


@blueprint.route("/chat/completions", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(ChatCompletion(), example=CHAT.request, error_status_code=400)
@blueprint.response(
    200, description="A chat.completion; with `stream`, its chunks as server-sent events", example=CHAT.response
)
def chat_completions(asked: dict[str, Any]) -> Response | dict[str, Any]:
    """Answer in a conversation, by the model's chat template."""
    return _answered(services().openai.chat(current_caller(), asked, gone()), asked)


@blueprint.route("/models", methods=["GET"])
@blueprint.response(200, description="A list of model objects")
def models() -> dict[str, Any]:
    """List the base models that can be sampled now, and the caller's sampler checkpoints."""
    return {"object": "list", "data": services().openai.models(current_caller())}


@blueprint.route("/models/<path:model>", methods=["GET"])
@blueprint.response(200, description="A model object")
def retrieve_model(model: str) -> dict[str, Any]:
    """Return one model by its id."""
    return services().openai.model(current_caller(), model)


def _answered(answer: Answer, asked: Mapping[str, Any]) -> Response | dict[str, Any]:
    return answered(answer, _event, stream=asked["stream"], end=_DONE)


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
