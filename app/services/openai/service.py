"""OpenAI's calls as sampling requests, and their results as its answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from app.domain.identity import Caller
from app.domain.sampling import SampleRequest
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, sampler_role
from app.services.checks.sampling import check_size
from app.services.holds import Holds
from app.services.openai import tools
from app.services.openai.answers import Form, Head, usage
from app.services.openai.chats import ChatForm
from app.services.openai.completions import CompletionForm
from app.services.openai.following import Asked, Following
from app.services.openai.generation import Choices, Delta, Options
from app.services.openai.messages import for_template
from app.services.openai.samplers import Samplers
from app.services.openai.targets import Target
from app.services.openai.tokenizer import Tokenizers

Gone = Callable[[], bool]
"""Whether the client went away."""


class Answer:
    """One call's. Take `whole` or `chunks`, once, and close it in any case."""

    def __init__(
        self, head: Head, form: Form, choices: Sequence[Choices], deltas: Iterator[Delta], close: Callable[[], None]
    ) -> None:
        self._head, self._form, self._choices, self._deltas, self.close = head, form, choices, deltas, close

    def whole(self) -> dict[str, Any]:
        """Raises UserOpError, ServerOpError, ClientGone or Unavailable."""
        answer = self._form.whole(self._head, self._deltas)
        return {**answer, "usage": self._usage()}

    def chunks(self, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Raises the same on the way."""
        empty = {"usage": None} if with_usage else {}
        for chunk in self._form.chunks(self._head, self._deltas):
            yield {**chunk, **empty}
        if with_usage:
            yield {**self._form.last(self._head), "usage": self._usage()}

    def _usage(self) -> Mapping[str, int]:
        prompt, sampled = (sum(getattr(c, name) for c in self._choices) for name in ("prompt_tokens", "sampled_tokens"))
        return usage(prompt, sampled)


class OpenAiService:
    """Every prompt is a sampling request of its own, journalled and retried like asample's."""

    def __init__(
        self,
        bases: BaseModels,
        samplers: Samplers,
        admission: AdmissionService,
        holds: Holds,
        follow: Following,
    ) -> None:
        self._bases, self._samplers, self._admission = bases, samplers, admission
        self._holds, self._follow = holds, follow
        self._tokenizers = Tokenizers(bases)

    def models(self, caller: Caller) -> list[dict[str, Any]]:
        """What can be asked for as `model`."""
        return [
            {"id": name, "object": "model", "created": int(created), "owned_by": "tinsmith"}
            for name, created in self._samplers.models(caller)
        ]

    def complete(self, caller: Caller, asked: Mapping[str, Any], gone: Gone) -> Answer:
        """Raises NotFound, BadRequest, TooManyRequests or Unavailable; nothing is asked of a sampler then."""
        model = self._model(caller, asked["model"])
        top, echo, most = asked["logprobs"], asked["echo"], asked["max_tokens"]
        options = Options(scores=top is not None, echo=echo, hidden=most == 0)
        requests = [
            model.request(asked, prompt, most, top=top or 0, score_prompt=echo and options.scores)
            for prompt in model.prompts(asked["prompt"])
        ]
        if echo and options.scores:  # every choice repeats its prompt
            check_size("echo with logprobs", asked["n"] * (1 + top), sum(len(request.prompt) for request in requests))
        return self._answer(caller, model, asked, requests, CompletionForm(top), options, gone)

    def chat(self, caller: Caller, asked: Mapping[str, Any], gone: Gone) -> Answer:
        """Raises the same."""
        model = self._model(caller, asked["model"])
        offered = [] if asked["tool_choice"] == "none" else asked["tools"]
        prompt = model.tokenizer.encode_chat(for_template(asked["messages"]), offered, model.info.max_context)
        most = asked["max_completion_tokens"] or asked["max_tokens"]
        request = model.request(asked, prompt, most, top=asked["top_logprobs"])
        calls = bool(offered) and tools.are_understood(model.tokenizer.template(offered))
        form = ChatForm(scores=asked["logprobs"], tools=calls)
        return self._answer(caller, model, asked, [request], form, Options(scores=asked["logprobs"]), gone)

    def _model(self, caller: Caller, name: str) -> Target:
        sampler_id, sampler = self._samplers.of(caller, name)
        info = self._bases.info(sampler_role(full=sampler.full), sampler.base_model)
        return Target(sampler_id, sampler, info, self._tokenizers.of(sampler.base_model))

    def _answer(
        self,
        caller: Caller,
        model: Target,
        asked: Mapping[str, Any],
        requests: Sequence[SampleRequest],
        form: Form,
        options: Options,
        gone: Gone,
    ) -> Answer:
        with ExitStack() as undo:
            undo.enter_context(self._holds.occupy())
            self._samplers.ensure(model.sampler_id, model.sampler)
            choices = []
            for place, request in enumerate(requests):
                admitted = self._admit(caller, model, request)
                choices.append(Choices(model.tokenizer, request, admitted, place * asked["n"], options))
                undo.callback(self._leave, choices[-1])
            head = Head(choices[0].asked.request_id, int(time.time()), asked["model"])
            deltas = chain.from_iterable(choice.deltas(self._follow, gone) for choice in choices)
            return Answer(head, form, choices, deltas, undo.pop_all().close)

    def _leave(self, choices: Choices) -> None:
        self._follow.leave(choices.asked, ended=choices.ended)

    def _admit(self, caller: Caller, model: Target, request: SampleRequest) -> Asked:
        """Under a number of its own: clients send none, so a call that is sent again is another one."""
        number = secrets.randbits(62)
        request_id = self._admission.admit_sample(caller, model.sampler_id, model.sampler, number, request)
        return Asked(request_id, caller, request.stream)
