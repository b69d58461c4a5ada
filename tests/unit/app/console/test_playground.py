"""The playground asks the chosen models one chat, and shows the probability of each token."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import redis
from flask import Flask
from werkzeug.test import TestResponse

from app import ids
from app.domain.limits import Limits
from app.domain.records import Sampler
from app.domain.results import Result
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.errors import TooManyRequests, Unavailable
from app.stores.objects.captures import ROOT
from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, KEY, OTHER_KEY, Api
from tests.unit.app.console.conftest import Browser
from tests.unit.app.console.test_account import rows

Browsers = Callable[..., Browser]
FORM = {"model": BASE, "prompt": "hi", "system": "", "temperature": "0.5", "max_tokens": "20", "seed": ""}


@pytest.fixture
def browser(served: tuple[Api, Standin], app: Flask) -> Browsers:
    def made(key: str = KEY) -> Browser:
        browser = Browser(app)
        assert browser.log_in(key).status_code == 302
        browser.get("playground")
        return browser

    return made


def tokens(answer: TestResponse) -> list[list[tuple[str, str, str]]]:
    """(shade, probability, text) of the tokens of each answer."""
    found = re.findall(r'<p class="answer tokens">(.*?)</p>', answer.text, re.DOTALL)
    return [re.findall(r'<span class="shade(.)" title="(.*?)">(.*?)</span>', one, re.DOTALL) for one in found]


def texts(answer: TestResponse) -> list[str]:
    return [unescape("".join(text for _, _, text in one)) for one in tokens(answer)]


def likely(standin: Standin, text: str, probabilities: list[float]) -> None:
    """The stand-in answers with the text, each token of which has such a probability."""
    drawn = np.array(standin.tokenizer.encode(text), np.int32)
    logprobs = np.log(np.array(probabilities, np.float32))
    standin.answer = lambda *_: SampleOutput((SampledSequence(drawn, logprobs, False),))


def test_a_chat_is_answered_with_the_probability_of_each_token(
    served: tuple[Api, Standin],
    browser: Browsers,
) -> None:
    likely(served[1], "ab<", [0.9, 0.05, 0.5])
    (found,) = tokens(browser().post("playground", **FORM))
    assert found == [("4", "90.0%", "a"), ("1", "5.0%", "b"), ("3", "50.0%", "&lt;")]


def test_each_token_stands_with_its_probability_in_a_table(served: tuple[Api, Standin], browser: Browsers) -> None:
    likely(served[1], "a <\n", [0.9, 0.05, 0.5, 1.0])
    page = browser().post("playground", **FORM).text
    assert [(unescape(token), probability) for token, probability in rows(page, f"Tokens of {BASE}")] == [
        ("<code>'a'</code>", "90.0%"),
        ("<code>' '</code>", "5.0%"),
        ("<code>'<'</code>", "50.0%"),
        (r"<code>'\n'</code>", "100.0%"),
    ]


def test_a_character_of_several_tokens_is_shown_whole(
    served: tuple[Api, Standin],
    browser: Browsers,
) -> None:
    likely(served[1], "é", [0.5, 0.5])
    answer = browser().post("playground", **FORM)
    assert '<p class="answer">é</p>' in answer.text and len(tokens(answer)[0]) == 2


def test_a_sample_that_fails_is_a_page_in_words(
    served: tuple[Api, Standin],
    browser: Browsers,
) -> None:
    served[1].answer = lambda *_: Result.failure("the prompt is odd")
    answer = browser().post("playground", **FORM)
    assert answer.status_code == 400 and "the prompt is odd" in answer.text and "<html" in answer.text


def test_two_models_are_asked_the_same(served: tuple[Api, Standin], browser: Browsers) -> None:
    api, standin = served
    path = save_checkpoint(api, api.model(), "sampler_weights", prefix="models/x")

    def answer_of(request_id: str, _: SampleRequest) -> SampleOutput:
        sampler = api.services.records.find(Sampler, ids.parent_of(request_id))
        return SampleOutput((standin.sequence("tuned" if sampler and sampler.model_path else "hello"),))

    standin.answer = answer_of
    both: dict[str, str | list[str]] = {**FORM, "model": [BASE, path], "seed": "7"}
    answer = browser().post("playground", **both)
    assert texts(answer) == ["hello", "tuned"]
    one, other = standin.seen
    assert (
        (one.seed, one.temperature, one.max_tokens) == (other.seed, other.temperature, other.max_tokens) == (7, 0.5, 20)
    )
    assert re.findall(r"<h2>(.*?)</h2>", answer.text) == [BASE, path]


def test_the_form_keeps_its_values(served: tuple[Api, Standin], browser: Browsers) -> None:
    served[1].says("x")
    page = browser().post("playground", **{**FORM, "prompt": "</textarea><b>", "system": "Be brief."}).text
    assert ">&lt;/textarea&gt;&lt;b&gt;</textarea>" in page and ">Be brief.</textarea>" in page
    assert f"<option selected>{BASE}</option>" in page
    assert 'action="/console/playground#answers"' in page, "a phone shows the answers, which are below the form"


def test_a_long_prompt_is_asked_as_it_is_and_the_form_keeps_it(served: tuple[Api, Standin], browser: Browsers) -> None:
    """As a form, 40,000 Chinese characters are 360,000 bytes. They are too many tokens for this model."""
    long = "\u5b57" * 40_000
    answer = browser().post("playground", **{**FORM, "prompt": long})
    assert (answer.status_code, long in answer.text) == (400, True)
    assert "tokens" in answer.text.partition('role="alert">')[2].partition("</p>")[0]


def test_a_checkpoint_is_chosen_by_its_link(served: tuple[Api, Standin], browser: Browsers) -> None:
    api, _ = served
    path = save_checkpoint(api, api.model(), "sampler_weights", prefix="models/x")
    logged_in = browser()
    assert f'href="/console/playground?model={path}"' in unescape(logged_in.get("checkpoints").text).replace("%3A", ":")
    assert f"<option selected>{path}</option>" in logged_in.get(f"playground?model={path}").text


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": ""}, 400, "choose one or two"),
        ({"model": [BASE, "a", "b"]}, 400, "choose one or two"),
        ({"model": "org/none"}, 404, "org/none"),
        ({"max_tokens": "513"}, 400, "1 to 512"),
        ({"max_tokens": "x"}, 400, "a whole number"),
        ({"temperature": "9"}, 400, "temperature"),
        ({"seed": "-1"}, 400, "seed"),
    ],
)
def test_a_wrong_form_is_refused_in_words_and_samples_nothing(
    served: tuple[Api, Standin],
    browser: Browsers,
    change: dict[str, str | list[str]],
    status: int,
    said: str,
) -> None:
    served[1].says("x")
    form: dict[str, str | list[str]] = {**FORM, **change}
    answer = browser().post("playground", **form)
    assert answer.status_code == status and said in unescape(answer.text)
    assert ">hi</textarea>" in answer.text
    assert served[1].seen == []


def test_a_sample_beside_a_model_that_is_refused_is_cancelled(served: tuple[Api, Standin], browser: Browsers) -> None:
    both: dict[str, str | list[str]] = {**FORM, "model": [BASE, "org/none"]}
    assert browser().post("playground", **both).status_code == 404
    assert served[0].services.oplog.pending() == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (TooManyRequests("too many calls wait"), 429, "too many calls wait"),
        (Unavailable("no sampler has room"), 503, "no sampler has room"),
        (redis.ConnectionError(), 503, "the state server does not answer"),
    ],
)
def test_the_form_is_shown_again_with_its_values_and_what_failed(
    served: tuple[Api, Standin],
    browser: Browsers,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    said: str,
) -> None:
    logged_in, openai = browser(), served[0].services.openai
    fail = Mock(side_effect=error)
    monkeypatch.setattr(openai, "chat", fail)
    if isinstance(error, redis.RedisError):
        monkeypatch.setattr(openai, "models", fail)
    answer = logged_in.post("playground", **{**FORM, "prompt": "of an hour", "system": "Be brief.", "seed": "7"})
    assert answer.status_code == status and said in answer.text
    assert ">of an hour</textarea>" in answer.text and ">Be brief.</textarea>" in answer.text
    assert 'value="7"' in answer.text and f"<option selected>{BASE}</option>" in answer.text


def test_answers_are_kept_like_those_of_other_clients(
    served: tuple[Api, Standin], browser: Browsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, standin = served
    limits, objects = api.services.captures._limits, api.services.objects
    monkeypatch.setattr(limits, "_default", Limits(capture_days=7))
    monkeypatch.setattr(limits, "_found", {})
    standin.says("x")
    browser().post("playground", **FORM)
    (kept,) = cast(Any, api.get("captures").json)["captures"]
    objects.delete(objects.list(f"{ROOT}/"))
    assert (kept["model"], len(kept["datums"])) == (BASE, 1)


def test_a_model_of_others_is_not_sampled(served: tuple[Api, Standin], browser: Browsers) -> None:
    api, standin = served
    standin.says("x")
    path = save_checkpoint(api, api.model(), "sampler_weights", prefix="models/x")
    stranger = browser(OTHER_KEY)
    assert path not in stranger.get("playground").text
    assert stranger.post("playground", **{**FORM, "model": path}).status_code == 404
    assert standin.seen == []
