"""OpenAI-compatible calls: turns each into sampling requests on the sampler that its model names, and their results
into answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Sampler
from app.domain.sampling import SampleRequest
from app.errors import BadRequest, NotFound
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, sampler_role
from app.services.openai.answer_text import ParseOptions
from app.services.openai.answers import AnswerHead, ChatForm, CompletionForm, Form, Usage
from app.services.openai.captures import CaptureService
from app.services.openai.generation import Choices, Delta, TokenOptions
from app.services.openai.images import ImageTokensOf
from app.services.openai.json_schema import ANY_OBJECT, checked_schema
from app.services.openai.requests import Chat, Sampling, Target
from app.services.openai.samplers import Samplers
from app.services.openai.streaming import Gone, PendingSample, ResultStream
from app.services.openai.tokenizer import Tokenizers
from app.services.polling import LongPollLimiter
from app.services.sampling import check_size
from app.services.tenants.limits import QuotaService
from app.settings import LimitSettings
from app.stores.hub_cache import HubCache

MakeForm = Callable[[ParseOptions], Form]
"""Returns the form of an answer, which reads thoughts and tool calls in this way."""


class Answer:
    """The answer of one call. Use `whole` or `chunks`, once, and always close it."""

    def __init__(
        self,
        head: AnswerHead,
        form: Form,
        choices: Sequence[Choices],
        deltas: Iterator[Delta],
        close: Callable[[], None],
    ) -> None:
        self._head, self._form, self._choices, self._deltas, self.close = head, form, choices, deltas, close

    def whole(self) -> dict[str, Any]:
        """The whole answer. Raises UserOpError, ServerOpError, ClientGone or Unavailable."""
        return self._form.whole(self._head, self._deltas, self._usage)

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The answer's chunks as they come. Raises the same errors midway."""
        return self._form.chunks(self._head, self._deltas, self._usage)

    def _usage(self) -> Usage:
        return Usage(
            sum(choices.prompt_tokens for choices in self._choices),
            sum(choices.sampled_tokens for choices in self._choices),
            sum(choices.cached_tokens for choices in self._choices),
        )


class OpenAiService:
    """Runs the calls of OpenAI's clients, and the chats of other clients. Every prompt is a separate sampling request,
    journaled and retried like asample's."""

    def __init__(
        self,
        bases: BaseModels,
        samplers: Samplers,
        admission: AdmissionService,
        quotas: QuotaService,
        poll_limiter: LongPollLimiter,
        result_stream: ResultStream,
        captures: CaptureService,
        limits: LimitSettings,
        cache: HubCache,
    ) -> None:
        self._captures, self._limits = captures, limits
        self._bases, self._samplers, self._admission = bases, samplers, admission
        self._quotas, self._poll_limiter, self._result_stream = quotas, poll_limiter, result_stream
        self._tokenizers, self._image_tokens_of = Tokenizers(bases, cache), ImageTokensOf(bases, cache)

    def models(self, caller: Caller) -> list[dict[str, Any]]:
        """The models that a call can name as `model`."""
        return [_entry(name, created) for name, created in self._samplers.models(caller)]

    def model(self, caller: Caller, name: str) -> dict[str, Any]:
        """The entry of `models` with this name. Raises NotFound."""
        created = self._samplers.created(caller, name)
        if created is None:
            raise NotFound(
                f"there is no model {name[:200]!r} here, or no sampler for it; /models lists those there are"
            )
        return _entry(name, created)

    def complete(self, caller: Caller, asked: Mapping[str, Any], gone: Gone) -> Answer:
        """The answer of a completion. Raises NotFound, BadRequest, TooManyRequests or Unavailable; no sampler runs the
        call then."""
        target = self._target(caller, asked["model"])
        top, echo, most = asked["logprobs"], asked["echo"], asked["max_tokens"]
        with_ids = asked["return_token_ids"]
        options = TokenOptions(scores=top is not None, ids=with_ids, echo=echo, hidden=most == 0)
        sampling = _sampling(asked, most, top or 0)
        requests = [
            target.request(sampling, prompt, score_prompt=echo and options.scores)
            for prompt in target.prompts(asked["prompt"])
        ]
        if echo and options.scores:  # every choice repeats its prompt
            check_size("echo with logprobs", asked["n"] * (1 + top), sum(len(request.prompt) for request in requests))
        form = CompletionForm(top, ids=with_ids, with_usage=_with_usage(asked))
        return self._answer(caller, target, requests, form, options, gone)

    def chat(self, caller: Caller, asked: Mapping[str, Any], gone: Gone) -> Answer:
        """The answer of a chat. Raises the same errors."""
        most, schema = asked["max_completion_tokens"] or asked["max_tokens"], _schema(asked["response_format"])
        chat = Chat(
            asked["model"],
            asked["messages"],
            tools=[] if asked["tool_choice"] == "none" else asked["tools"],
            parallel=asked["parallel_tool_calls"],
            variables=asked["chat_template_kwargs"],
            effort=asked["reasoning_effort"],
            is_json=bool(schema),
            separate=asked["separate_reasoning"],
        )
        sampling = _sampling(asked, most, asked["top_logprobs"], schema)
        options = TokenOptions(scores=asked["logprobs"], ids=asked["return_token_ids"])
        form = partial(ChatForm, scores=options.scores, ids=options.ids, with_usage=_with_usage(asked))
        return self.converse(caller, chat, sampling, form, gone, options)

    def converse(
        self, caller: Caller, chat: Chat, sampling: Sampling, form: MakeForm, gone: Gone, options: TokenOptions
    ) -> Answer:
        """The answer in a conversation. Raises the same errors."""
        target = self._target(caller, chat.model)
        if chat.is_json and (chat.tools or chat.prefill):
            raise BadRequest("an answer that follows a JSON schema holds no tool call and continues no text: send none")
        text, prompt = target.chat_prompt(chat)
        request = target.chat_request(chat, sampling, prompt)
        parsing = target.parsing(chat, text)
        options = replace(options, tags=parsing.tags)
        return self._answer(caller, target, [request], form(parsing), options, gone)

    def count(self, caller: Caller, chat: Chat) -> int:
        """The number of the prompt's tokens in a conversation. It changes nothing, but to encode a text takes time, so
        it is charged as a call. Raises NotFound, BadRequest, TooManyRequests or Unavailable."""
        target = self._target(caller, chat.model)
        self._quotas.take(caller, caller.project)
        _, prompt = target.chat_prompt(chat)
        return len(prompt.tokens)

    def _target(self, caller: Caller, name: str) -> Target:
        sampler_id, sampler = self._samplers.of(caller, name)
        info = self._bases.info(sampler_role(full=sampler.full), sampler.base_model)
        tokenizer = self._tokenizers.of(sampler.base_model)
        return Target(name, sampler_id, sampler, info, tokenizer, self._image_tokens_of, self._limits)

    def _answer(
        self,
        caller: Caller,
        target: Target,
        requests: Sequence[SampleRequest],
        form: Form,
        options: TokenOptions,
        gone: Gone,
    ) -> Answer:
        with ExitStack() as undo:
            undo.enter_context(self._poll_limiter.occupy(caller.project))
            self._samplers.ensure(target.sampler_id, target.sampler)
            choices: list[Choices] = []
            for request in requests:
                # OpenAI's clients send no number, so a repeated call is a new call.
                number, first = secrets.randbits(62), len(choices) * request.num_samples
                pending = PendingSample(ids.request_id(target.sampler_id, number), caller, request.stream)
                choices.append(Choices(target.tokenizer, request, pending, first, options))
                # Before the admission, which may raise although the request is admitted.
                undo.callback(self._leave, choices[-1])
                self._admission.admit_sample(caller, target.sampler_id, target.sampler, number, request)
            head = AnswerHead(choices[0].pending.request_id, int(time.time()), target.name)
            deltas = chain.from_iterable(self._deltas(target.sampler, choice, gone) for choice in choices)
            return Answer(head, form, choices, deltas, undo.pop_all().close)

    def _deltas(self, sampler: Sampler, choices: Choices, gone: Gone) -> Iterator[Delta]:
        yield from choices.deltas(self._result_stream, gone)
        self._captures.keep(sampler, choices.pending.request_id, choices.request, choices.sequences)

    def _leave(self, choices: Choices) -> None:
        self._result_stream.leave(choices.pending, ended=choices.ended)


def _entry(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "tinsmith"}


def _sampling(asked: Mapping[str, Any], most: int | None, top: int, schema: str = "") -> Sampling:
    stop = asked["stop"] or ()
    return Sampling(
        max_tokens=most,
        temperature=asked["temperature"],
        top_p=asked["top_p"],
        stream=asked["stream"],
        top_k=asked["top_k"] or -1,
        stop=(stop,) if isinstance(stop, str) else stop,
        seed=asked["seed"],
        n=asked["n"],
        top=top,
        json_schema=schema,
    )


def _schema(response_format: Mapping[str, Any]) -> str:
    """The JSON schema that a response_format asks for; empty for plain text. Raises BadRequest."""
    if response_format["type"] == "json_schema":
        return checked_schema(response_format["json_schema"]["schema"], "response_format.json_schema.schema")
    return ANY_OBJECT if response_format["type"] == "json_object" else ""


def _with_usage(asked: Mapping[str, Any]) -> bool:
    include: bool = asked["stream_options"]["include_usage"]
    return include
