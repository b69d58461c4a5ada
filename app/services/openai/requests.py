"""The sampling requests of a call: its prompts as tokens, and the parameters of their samples."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from app.domain.records import BaseModelInfo, Sampler
from app.domain.sampling import SampleRequest
from app.errors import BadRequest
from app.services.openai.answer_text import ParseOptions, thoughts_of
from app.services.openai.chat_templates import for_template
from app.services.openai.harmony import STOPS, HarmonyOptions, for_harmony, is_harmony, opened
from app.services.openai.images import ImageTokensOf, image_files
from app.services.openai.tokenizer import BaseTokenizer
from app.services.openai.tool_calls import OfferedTools, format_of
from app.services.sampling import check_sample
from app.services.validation import check_reads_images
from app.settings import LimitSettings
from app.wire.images import ModelInput, text_input
from app.wire.json_bodies import model_input

_EFFORT = "reasoning_effort"
"""The variable of templates."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ABOVE_HIGH = ("max", "xhigh")
Effort = str | float
"""How much a model thinks: one of these names, or a number from 0 to 1. The chat template decides what it reads."""


def is_effort(value: Any) -> bool:
    """True for an Effort."""
    if isinstance(value, str):
        return value in EFFORTS
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def known_effort(template: str, effort: Effort) -> Effort:
    """The effort. One above high that the template does not name becomes another one above high, or high if the
    template names none, as that of gpt-oss."""
    if effort not in _ABOVE_HIGH:
        return effort
    names = (str(effort), *_ABOVE_HIGH)
    return next((name for name in names if f"'{name}'" in template or f'"{name}"' in template), "high")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of a call's samples. `max_tokens` None: as many as the context holds. `seed` None: a random one.
    `top`: the number of most likely tokens at each position. top_k -1 means off. `json_schema`: see SampleRequest."""

    max_tokens: int | None
    temperature: float
    top_p: float
    stream: bool
    stop: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    top: int = 0
    top_k: int = -1
    json_schema: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with a model. `messages` and `tools` have OpenAI's form. Without `parallel`, the first tool call
    of an answer is kept. `prefill` is the beginning of the answer. `variables`: further variables of the template.
    `effort`: its `reasoning_effort`, if it reads one. Without `needs_effort`, a template that refuses this one gets the
    nearest or none. `is_json`: the answer follows a JSON schema. Without `separate`, the thoughts stay in its text."""

    model: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    variables: Mapping[str, Any]
    effort: Effort | None
    is_json: bool
    prefill: str = ""
    needs_effort: bool = True
    separate: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """The sampler of a call. `name`: the model as the call names it. `info` is reported by a live sampler of the base
    model."""

    name: str
    sampler_id: str
    sampler: Sampler
    info: BaseModelInfo
    tokenizer: BaseTokenizer
    image_tokens_of: ImageTokensOf
    limits: LimitSettings

    def prompts(self, given: Any) -> list[ModelInput]:
        """The prompts from a text, from token ids, or from a list of either. Raises BadRequest for token
        ids that are not int32."""
        several = isinstance(given, list) and not isinstance(given[0], int)
        return [self._prompt(prompt) for prompt in (given if several else [given])]

    def chat_prompt(self, chat: Chat) -> tuple[str, ModelInput]:
        """The prompt of a conversation: its text without the prefill, and its tokens and images. Raises BadRequest, for
        instance for an effort that the template refuses, or Unavailable while the files of the model's image
        processor cannot be fetched."""
        files = image_files(chat.messages)
        check_reads_images(files, self.info)
        text = self._chat_text(chat)
        tokens = self.tokenizer.encode_rendered(text + chat.prefill, self.info.max_context)
        if files:
            return text, self.image_tokens_of(self.sampler.base_model).place(tokens, files)
        return text, text_input(tokens)

    def parsing(self, chat: Chat, text: str) -> ParseOptions:
        """How to read the answer to a conversation with a prompt of this text. Tool calls are read if the template
        teaches a known form of them. Raises BadRequest if thoughts on a channel of their own are to stay in the
        text."""
        if chat.is_json:
            return ParseOptions()
        if self._in_harmony(chat):
            if not chat.separate:
                raise BadRequest(
                    "separate_reasoning must be true for this model, whose thoughts are messages of their own; leave "
                    "it out"
                )
            harmony = HarmonyOptions.of(text + chat.prefill, calls=bool(chat.tools))
            return ParseOptions(parallel=chat.parallel, harmony=harmony)
        template = self.tokenizer.template(chat.tools)
        form = format_of(template) if chat.tools else None
        tools = OfferedTools(form, chat.tools) if form else None
        return ParseOptions(thoughts_of(template, text, chat.prefill), tools, chat.parallel, chat.separate)

    def chat_request(self, chat: Chat, sampling: Sampling, prompt: ModelInput) -> SampleRequest:
        """A checked request for an answer in a conversation. Raises BadRequest. The tokens that end an answer in
        harmony do not count as the caller's stops."""
        request = self.request(sampling, prompt)
        ends = self.tokenizer.special_ids(STOPS) if self._in_harmony(chat) else ()
        return replace(request, stop_tokens=tuple(ends))

    def request(self, sampling: Sampling, prompt: ModelInput, *, score_prompt: bool = False) -> SampleRequest:
        """A checked request. Raises BadRequest.

        Only the sampled tokens themselves are streamed, so a request for more than those is not streamed.
        """
        room, most = max(1, self.info.max_context - len(prompt.tokens)), sampling.max_tokens
        request = SampleRequest(
            prompt=prompt.tokens,
            num_samples=sampling.n,
            max_tokens=room if most is None else min(room, max(1, most)),
            seed=secrets.randbits(31) if sampling.seed is None else sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_strings=tuple(sampling.stop),
            prompt_logprobs=score_prompt,
            prompt_top=sampling.top if score_prompt else 0,
            sample_top=sampling.top,
            stream=sampling.stream and not (sampling.top or score_prompt) and most != 0,
            images=tuple(prompt.images),
            json_schema=sampling.json_schema,
        )
        check_sample(request, self.info, self.limits)
        return request

    def _in_harmony(self, chat: Chat) -> bool:
        return is_harmony(self.tokenizer.template(chat.tools))

    def _chat_text(self, chat: Chat) -> str:
        template, effort = self.tokenizer.template(chat.tools), chat.effort
        if effort is None or _EFFORT not in template:
            return self._rendered(chat, None)
        if chat.needs_effort:
            return self._rendered(chat, effort)
        with suppress(BadRequest):  # templates may refuse the efforts that they do not know
            return self._rendered(chat, known_effort(template, effort))
        return self._rendered(chat, None)

    def _rendered(self, chat: Chat, effort: Effort | None) -> str:
        variables = chat.variables if effort is None else {_EFFORT: effort, **chat.variables}
        messages = for_template(chat.messages)
        if not self._in_harmony(chat):
            return self.tokenizer.chat_text(messages, chat.tools, variables)
        text = self.tokenizer.chat_text(for_harmony(messages), chat.tools, variables)
        return text + opened(chat.prefill, is_json=chat.is_json)

    def _prompt(self, prompt: Any) -> ModelInput:
        if isinstance(prompt, str):
            return text_input(self.tokenizer.encode(prompt, self.info.max_context))
        return model_input([{"tokens": prompt}], "prompt")
