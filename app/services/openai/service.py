"""OpenAI-compatible calls: turns each into sampling requests on the sampler that its model names, and their results
into answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from app import ids
from app.domain.accounts import Caller
from app.domain.records import BaseModelInfo, Sampler, Session
from app.domain.sampling import SampleRequest
from app.errors import NotFound
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, sampler_role
from app.services.openai import answers
from app.services.openai.answers import AnswerHead, ChatForm, CompletionForm, Form, usage
from app.services.openai.generation import Choices, Delta, Options
from app.services.openai.streaming import Asked, ResultStream
from app.services.openai.tokenizer import BaseTokenizer, Tokenizers, for_template
from app.services.polling import LongPollLimiter
from app.services.sampling import SamplingService, check_sample, check_size
from app.services.tenants.access import check_role, list_checkpoints
from app.settings import LimitSettings
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.wire.bodies import model_input

Gone = Callable[[], bool]
"""Returns True when the client has closed the connection."""

_SCHEME = "tinker://"
_KIND = "sampler_weights"


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
        answer = self._form.whole(self._head, self._deltas)
        return {**answer, "usage": self._usage()}

    def chunks(self, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The answer's chunks as they come. Raises the same errors midway."""
        empty = {"usage": None} if with_usage else {}
        for chunk in self._form.chunks(self._head, self._deltas):
            yield {**chunk, **empty}
        if with_usage:
            yield {**self._form.last(self._head), "usage": self._usage()}

    def _usage(self) -> Mapping[str, int]:
        prompt, sampled = (sum(getattr(c, name) for c in self._choices) for name in ("prompt_tokens", "sampled_tokens"))
        return usage(prompt, sampled)


class OpenAiService:
    """Runs OpenAI-compatible calls. Every prompt is a separate sampling request, journaled and retried like
    asample's."""

    def __init__(
        self,
        bases: BaseModels,
        samplers: Samplers,
        admission: AdmissionService,
        poll_limiter: LongPollLimiter,
        result_stream: ResultStream,
        limits: LimitSettings,
    ) -> None:
        self._limits = limits
        self._bases, self._samplers, self._admission = bases, samplers, admission
        self._poll_limiter, self._result_stream = poll_limiter, result_stream
        self._tokenizers = Tokenizers(bases)

    def models(self, caller: Caller) -> list[dict[str, Any]]:
        """The models that a call can name as `model`."""
        return [
            {"id": name, "object": "model", "created": int(created), "owned_by": "tinsmith"}
            for name, created in self._samplers.models(caller)
        ]

    def model(self, caller: Caller, name: str) -> dict[str, Any]:
        """The entry of `models` with this name. Raises NotFound."""
        found = next((model for model in self.models(caller) if model["id"] == name), None)
        if found is None:
            raise NotFound(
                f"there is no model {name[:200]!r} here, or no sampler for it; /models lists those there are"
            )
        return found

    def complete(self, caller: Caller, asked: Mapping[str, Any], gone: Gone) -> Answer:
        """The answer of a completion. Raises NotFound, BadRequest, TooManyRequests or Unavailable; no sampler runs the
        call then."""
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
        """The answer of a chat. Raises the same errors."""
        model = self._model(caller, asked["model"])
        offered = [] if asked["tool_choice"] == "none" else asked["tools"]
        prompt = model.tokenizer.encode_chat(for_template(asked["messages"]), offered, model.info.max_context)
        most = asked["max_completion_tokens"] or asked["max_tokens"]
        request = model.request(asked, prompt, most, top=asked["top_logprobs"])
        calls = bool(offered) and answers.are_understood(model.tokenizer.template(offered))
        form = ChatForm(scores=asked["logprobs"], tools=calls, parallel=asked["parallel_tool_calls"])
        return self._answer(caller, model, asked, [request], form, Options(scores=asked["logprobs"]), gone)

    def _model(self, caller: Caller, name: str) -> Target:
        sampler_id, sampler = self._samplers.of(caller, name)
        info = self._bases.info(sampler_role(full=sampler.full), sampler.base_model)
        return Target(sampler_id, sampler, info, self._tokenizers.of(sampler.base_model), self._limits)

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
            undo.enter_context(self._poll_limiter.occupy(caller.project))
            self._samplers.ensure(model.sampler_id, model.sampler)
            choices = []
            for place, request in enumerate(requests):
                admitted = self._admit(caller, model, request)
                choices.append(Choices(model.tokenizer, request, admitted, place * asked["n"], options))
                undo.callback(self._leave, choices[-1])
            head = AnswerHead(choices[0].asked.request_id, int(time.time()), asked["model"])
            deltas = chain.from_iterable(choice.deltas(self._result_stream, gone) for choice in choices)
            return Answer(head, form, choices, deltas, undo.pop_all().close)

    def _leave(self, choices: Choices) -> None:
        self._result_stream.leave(choices.asked, ended=choices.ended)

    def _admit(self, caller: Caller, model: Target, request: SampleRequest) -> Asked:
        """Admits the request under a random number. OpenAI's clients send none, so a repeated call is a new call."""
        number = secrets.randbits(62)
        request_id = self._admission.admit_sample(caller, model.sampler_id, model.sampler, number, request)
        return Asked(request_id, caller, request.stream)


@dataclass(frozen=True, slots=True)
class Target:
    """The sampler of a call. `info` is reported by a live sampler of the base model."""

    sampler_id: str
    sampler: Sampler
    info: BaseModelInfo
    tokenizer: BaseTokenizer
    limits: LimitSettings

    def prompts(self, given: Any) -> list[np.ndarray]:
        """int32 [n] for each prompt, from a text, from token ids, or from a list of either. Raises BadRequest for token
        ids that are not int32."""
        several = isinstance(given, list) and not isinstance(given[0], int)
        return [self._tokens(prompt) for prompt in (given if several else [given])]

    def request(
        self,
        asked: Mapping[str, Any],
        prompt: np.ndarray,
        most: int | None,
        *,
        top: int = 0,
        score_prompt: bool = False,
    ) -> SampleRequest:
        """A checked request for at most `most` tokens (None: as many as the context holds), with the `top` most likely
        tokens at each position. Raises BadRequest.

        Only the sampled tokens themselves are streamed, so a request for more than those is not streamed.
        """
        room = max(1, self.info.max_context - len(prompt))
        stop = asked["stop"] or ()
        request = SampleRequest(
            prompt=prompt,
            num_samples=asked["n"],
            max_tokens=room if most is None else min(room, max(1, most)),
            seed=secrets.randbits(31) if asked["seed"] is None else asked["seed"],
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            prompt_logprobs=score_prompt,
            prompt_top=top if score_prompt else 0,
            sample_top=top,
            stream=asked["stream"] and not (top or score_prompt) and most != 0,
        )
        check_sample(request, self.info, self.limits)
        return request

    def _tokens(self, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, self.info.max_context)
        return model_input([{"tokens": prompt}], "prompt").tokens


class Samplers:
    """Finds and stores the samplers of OpenAI-compatible calls. All of a project's samplers are in one session, which
    every request keeps alive."""

    def __init__(
        self, store: RedisRecords, lifecycle: RedisLifecycle, bases: BaseModels, sampling: SamplingService
    ) -> None:
        self._records, self._lifecycle, self._bases, self._sampling = store, lifecycle, bases, sampling

    def of(self, caller: Caller, model: str) -> tuple[str, Sampler]:
        """(id, sampler) of a base model, a tinker:// path, or "<base>;<path>"; nothing is stored.

        A new save under the same path is a different sampler. Raises Forbidden, NotFound (model, and foreign and
        missing paths with the same text), or BadRequest for a path that cannot be sampled.
        """
        check_role(caller, caller.project)
        base, path = _parts(model)
        served = self._bases.names()
        if base is not None and base not in served:
            raise NotFound(f"model {base[:200]!r} is not served here; the served models are: {', '.join(served)}")
        session_id = ids.openai_session_id(caller.project)
        sampler = self._sampling.resolve(caller, caller.project, session_id, base, path)
        return ids.openai_sampler_id(session_id, sampler.base_model, sampler.prefix), sampler

    def ensure(self, sampler_id: str, sampler: Sampler) -> None:
        """Stores the sampler, unless it exists. Raises Unavailable while there is no room for another."""
        if self._records.get(Sampler.namespace, sampler_id) is not None:
            return
        session = Session(sampler.owner, self._records.now(), display_name="OpenAI-compatible calls")
        self._records.put_new(Session.namespace, sampler.session_id, dump(session))
        self._lifecycle.heartbeat(sampler.session_id)
        self._records.put_new(Sampler.namespace, sampler_id, dump(sampler))

    def models(self, caller: Caller) -> list[tuple[str, float]]:
        """(name, creation time) of the base models and the caller's sampler checkpoints that have a live sampler."""
        live = self._bases.live()
        found = [(name, 0.0) for name in self._bases.names() if ("sampler", name) in live]
        theirs = list_checkpoints(self._records, caller.roles.keys())
        for path, checkpoint in sorted(theirs, key=lambda pair: pair[0]):
            is_sampled = (sampler_role(full=checkpoint.full), checkpoint.base_model) in live
            if is_sampled and checkpoint.kind == _KIND:
                found.append((path, checkpoint.created))
        return found

    def keep_alive(self, caller: Caller) -> None:
        """Keeps the caller's session alive while a request runs."""
        self._lifecycle.heartbeat(ids.openai_session_id(caller.project))


def _parts(model: str) -> tuple[str | None, str | None]:
    """(base model, path), each None if it was not given."""
    if model.startswith(_SCHEME):
        return None, model
    base, between, path = model.partition(f";{_SCHEME}")
    return base, _SCHEME + path if between else None
