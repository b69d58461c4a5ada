"""The console's playground: one chat, answered by one or two models side by side, with each token's probability."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from flask import Blueprint, render_template, request
from marshmallow import ValidationError
from redis import RedisError

from app.api.base import current_caller, needs, services
from app.api.chat.base import gone
from app.api.chat.openai import ChatCompletion
from app.console.failures import FAILURES, explain
from app.errors import BadRequest

_MOST_MODELS, _MOST_TOKENS = 2, 512
_START = {"temperature": "0.7", "max_tokens": "100", "seed": "", "system": "", "prompt": ""}
# Shades of a token, by the least probability of each: unlikely tokens stand out.
_SHADES = (0.0, 0.02, 0.1, 0.3, 0.7)


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token: its text, its probability in words, and its shade, from 0 for an unlikely one."""

    text: str
    probability: str
    shade: int

    @property
    def quoted(self) -> str:
        """The text in quotes, so that spaces and line ends are seen."""
        return repr(self.text)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of one model. `text` is also the text of its tokens, unless one token ends within a character."""

    model: str
    text: str
    tokens: Sequence[Token]
    finish: str

    @property
    def is_split(self) -> bool:
        """True if the texts of the single tokens make up the text."""
        return "".join(token.text for token in self.tokens) == self.text


def add(blueprint: Blueprint) -> None:
    """Adds the page and its form to the console."""
    blueprint.add_url_rule("/playground", "playground", _show, methods=["GET"])
    blueprint.add_url_rule("/playground", "play", needs("sample")(_play), methods=["POST"])


def _show() -> str:
    asked = request.args.get("model", "")
    return _page({**_START, "models": [asked] if asked else []}, _listed())


def _play() -> tuple[str, int]:
    """The form with the answers, or with the message of what failed."""
    form = {name: request.form.get(name, "") for name in _START}
    models = list(dict.fromkeys(model for model in request.form.getlist("model") if model))
    shown = {**form, "models": models}
    try:
        return _page(shown, _listed(), _sampled(form, models)), 200
    except FAILURES as error:
        message, status = explain(error)
        # Nothing else keeps what the user wrote, so the form is shown in an outage too.
        listed = () if isinstance(error, RedisError) else _listed()
        return _page(shown, listed, message=message), status


def _sampled(form: Mapping[str, str], models: Sequence[str]) -> Sequence[Answered]:
    """Asks all models at once, and waits for their answers. Raises the errors of a chat, and BadRequest for a wrong
    value in the form."""
    if not 1 <= len(models) <= _MOST_MODELS:
        raise BadRequest(f"{len(models)} models are chosen; choose one or two")
    bodies = [_body(form, model) for model in models]
    with ExitStack() as open_answers:
        asked = []
        for body in bodies:
            answer = services().openai.chat(current_caller(), body, gone())
            open_answers.callback(answer.close)
            asked.append(answer)
        return [_answered(model, answer.whole()) for model, answer in zip(models, asked, strict=True)]


def _listed() -> Sequence[str]:
    """The models that the user can choose."""
    return [model["id"] for model in services().openai.models(current_caller())]


def _page(form: Mapping[str, Any], listed: Sequence[str], answers: Sequence[Answered] = (), message: str = "") -> str:
    # A published checkpoint of others is not in the list.
    others = [model for model in form["models"] if model not in listed]
    models = [*others, *listed]
    return render_template("playground.html", form=form, models=models, answers=answers, message=message)


def _body(form: Mapping[str, str], model: str) -> Any:
    """The body of a chat completion. Raises BadRequest."""
    length = _count(form["max_tokens"], "the length")
    if not 1 <= length <= _MOST_TOKENS:
        raise BadRequest(f"the length is {length}; give 1 to {_MOST_TOKENS} tokens")
    system = [{"role": "system", "content": form["system"]}] if form["system"].strip() else []
    given = {
        "model": model,
        "messages": [*system, {"role": "user", "content": form["prompt"]}],
        "temperature": form["temperature"],
        "max_tokens": length,
        "seed": _count(form["seed"], "the seed") if form["seed"] else None,
        "logprobs": True,
    }
    try:
        return ChatCompletion().load(given)
    except ValidationError as error:
        raise BadRequest(
            "; ".join(f"{name}: {' '.join(map(str, texts))}" for name, texts in error.messages_dict.items())
        ) from None


def _count(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadRequest(f"{name} is {text[:80]!r}; give a whole number") from None


def _answered(model: str, answer: Mapping[str, Any]) -> Answered:
    (choice,) = answer["choices"]
    text = choice["message"]["content"] or ""
    return Answered(model, text, [_token(one) for one in choice["logprobs"]["content"]], choice["finish_reason"])


def _token(scored: Mapping[str, Any]) -> Token:
    probability = math.exp(scored["logprob"])
    shade = sum(probability >= least for least in _SHADES) - 1
    return Token(scored["token"], f"{probability:.1%}", shade)
