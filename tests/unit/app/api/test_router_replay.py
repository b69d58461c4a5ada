"""forward_backward with provenance spans: the journal stores the routes of the tokens that were sampled here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flask import Flask
from tinker.proto import tinker_public_pb2 as sdk
from werkzeug.test import TestResponse

from app import create_app, ids
from app.api.base import EXTENSION
from app.domain import ops
from app.domain.limits import Limits
from app.domain.records import Sampler
from app.domain.results import PROTOBUF, Result
from app.domain.routes import SequenceRoutes
from app.services import training
from app.settings import Settings
from app.stores.objects.routes import DAY_S, RouteFiles
from app.stores.redis.records import dump, load
from tests.unit.app.api.test_full import offering
from tests.unit.app.conftest import Api, batch

PROMPT, SAMPLE = [5, 6, 7], [8, 9, 10]
PROMPT_ROUTES = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
SAMPLE_ROUTES = PROMPT_ROUTES[:2] + 100
NONE = np.full((1, 2, 2), 255, np.uint8)


@pytest.fixture(scope="module")
def plain_app(settings: Settings) -> Flask:
    return create_app(settings)


@pytest.fixture(scope="module")
def app(settings: Settings) -> Flask:
    return create_app(offering(settings, router_replay=True))


@pytest.fixture
def sequence(api: Api) -> str:
    """A sequence of the caller's own, with its routes."""
    return stored(api, api.sampler())


def stored(api: Api, sampler: str, now: float | None = None) -> str:
    request_id = sampled(api, sampler).json["request_id"]
    sequence = ids.sequence_id(request_id, 0)
    files = RouteFiles(api.services.objects, api.services.records.now if now is None else lambda: now)
    prompt, sample = np.array(PROMPT, np.int32), np.array(SAMPLE, np.int32)
    routes = files.add({sequence: SequenceRoutes(prompt, PROMPT_ROUTES, sample, SAMPLE_ROUTES)})
    assert api.services.oplog.finish_sample(request_id, Result(b"x", PROTOBUF), routes=routes)
    return sequence


def sampled(api: Api, sampler: str, seq: int = 0) -> TestResponse:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
    return api.post("asample", asked)


def add_span(datum: sdk.Datum, kind: str, sequence: str, offset: int, length: int) -> None:
    span = getattr(datum.model_input_spans.add(), kind)
    span.sequence_id, span.offset, span.length = sequence, offset, length


def spanned(model: str, seq: int, tokens: list[int], *spans: tuple[str, str, int, int]) -> sdk.ForwardBackwardRequest:
    message = batch(model, seq, tokens=tokens, target_tokens=[1] * len(tokens))
    for span in spans:
        add_span(message.data[0], *span)
    return message


def routes_of(api: Api, model: str, seq: int = 1) -> ops.Ragged | None:
    entry = api.services.oplog.entry(model, seq)
    assert entry is not None
    return ops.decode(entry.payload).batch.routes


def test_the_journal_stores_the_routes_themselves(api: Api, sequence: str) -> None:
    model = api.model()
    message = spanned(
        model, 1, [*PROMPT[1:], *SAMPLE], ("prompt_tokens", sequence, 1, 2), ("sampled_tokens", sequence, 0, 3)
    )
    message.data.add().CopyFrom(batch(model, 1).data[0])  # a datum without spans
    assert api.forward_backward(message).status_code == 200
    found = routes_of(api, model)
    assert found is not None and found.values.dtype == np.uint8
    first, second = found
    assert np.array_equal(first, np.concatenate([PROMPT_ROUTES[1:], SAMPLE_ROUTES, NONE]))
    assert np.array_equal(second, np.concatenate([NONE] * 3))


def test_a_repeat_of_the_call_gets_the_same_future_whatever_the_routes_are_by_then(api: Api, sequence: str) -> None:
    model = api.model()
    message = spanned(model, 1, PROMPT, ("prompt_tokens", sequence, 0, 3))
    first = api.forward_backward(message).json
    [file] = [key for key in api.services.objects.list("routes/") if sequence in key]
    arrays = [np.array(PROMPT, np.int32), PROMPT_ROUTES + 1, np.array(SAMPLE, np.int32), SAMPLE_ROUTES]
    api.services.objects.delete([file])
    api.services.objects.put_new(file, SequenceRoutes(*arrays).encode())
    assert api.forward_backward(message).json == first
    assert np.array_equal(next(iter(routes_of(api, model))), PROMPT_ROUTES)
    api.services.objects.delete([file])
    assert api.forward_backward(message).json == first


def test_routes_count_as_stored_bytes_until_their_files_are_removed(
    api: Api, plain_app: Flask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used() -> list[int]:
        limits = api.get("limits").json
        return [limits[payer]["used"]["storage_bytes"] for payer in ("project", "key")]

    api.services.objects.delete(api.services.objects.list("routes/"))
    sampler = api.sampler()
    sequence = stored(api, sampler)
    [file] = api.services.objects.list("routes/")
    assert used() == [api.services.objects.size(file)] * 2
    plain = dataclasses.replace(api, client=plain_app.test_client(), services=plain_app.extensions[EXTENSION])
    for each in (api, plain):
        monkeypatch.setattr(each.services.quotas._limits, "_default", Limits(storage_bytes=used()[0]))
        each.services.quotas._limits._found.clear()
    refused = sampled(api, sampler, 1)
    assert (refused.status_code, "storage_bytes" in refused.json["detail"]) == (403, True)
    assert sampled(plain, sampler, 2).status_code == 200
    attempt = api.services.oplog.routes_of(ids.request_of(sequence))
    assert attempt is not None
    api.services.oplog.forget_routes(before=attempt.day)
    assert used()[0] > 0
    api.services.oplog.forget_routes(before=attempt.day + 1)
    assert used() == [0, 0]
    assert sampled(api, sampler, 1).status_code == 200
    for each in (api, plain):
        each.services.quotas._limits._found.clear()


def test_a_sequence_without_routes_is_refused_in_the_same_words_whoever_it_belongs_to(
    api: Api, stranger: Api, sequence: str
) -> None:
    unrecorded, old, elsewhere = api.sampler(), api.sampler(), api.sampler()
    of_another = stored(api, elsewhere)
    record = load(Sampler, api.services.records.get(Sampler.namespace, elsewhere))
    api.services.records.put(Sampler.namespace, elsewhere, dump(dataclasses.replace(record, base_model="org/other")))
    bad = {
        "foreign": (stranger, sequence),
        "unknown": (api, "s:sample:0:0-0"),
        "no id": (api, "../models/x"),
        "empty": (api, ""),
        "never recorded": (api, f"{unrecorded}:0-0"),
        "too old": (api, stored(api, old, api.services.records.now() - 2 * DAY_S)),
        "of another base model": (api, of_another),
    }
    for why, (caller, id_) in bad.items():
        model = caller.model()
        answer = caller.forward_backward(spanned(model, 1, PROMPT, ("prompt_tokens", id_, 0, 3)))
        assert answer.status_code == 400, why
        assert answer.json["detail"] == (
            f"sequence {id_!r} has no routes: it is unknown, older than a day, or was not sampled from org/tiny with "
            "router_replay. Leave its spans out to train on it without them"
        )
        assert api.services.oplog.entry(model, 1).payload == b"", why


@pytest.mark.parametrize(
    ("tokens", "spans", "said"),
    [
        (PROMPT, [("prompt_tokens", 1, 3)], "datum 0: its tokens from 0 to 3 are not those from 1 to 4 of sequence"),
        ([5, 6, 9], [("prompt_tokens", 0, 3)], "datum 0: its tokens from 0 to 3 are not those from 0 to 3 of sequence"),
        (PROMPT, [("sampled_tokens", 0, 3)], "datum 0: its tokens from 0 to 3 are not those"),
        (PROMPT, [("prompt_tokens", 0, 2)], "datum 0: its model_input_spans do not cover its 3 tokens, each once"),
        (PROMPT, [("prompt_tokens", 0, 3), ("prompt_tokens", 0, 3)], "do not cover its 3 tokens"),
        (PROMPT, [("prompt_tokens", -3, 3)], "do not cover its 3 tokens"),
        (PROMPT, [("prompt_tokens", 0, 4), ("prompt_tokens", 0, -1)], "do not cover its 3 tokens"),
        (PROMPT, [("prompt_tokens", 0, 0)], "do not cover its 3 tokens"),
        (PROMPT, [("prompt_tokens", 2**62, 3)], "datum 0: its tokens from 0 to 3 are not those"),
    ],
)
def test_spans_that_do_not_fit_their_datum_are_refused(
    api: Api, sequence: str, tokens: list[int], spans: list[tuple[str, int, int]], said: str
) -> None:
    message = spanned(api.model(), 1, tokens, *((kind, sequence, *rest) for kind, *rest in spans))
    answer = api.forward_backward(message)
    assert answer.status_code == 400 and said in answer.json["detail"], answer.json


def test_a_span_without_tokens_changes_nothing(api: Api, sequence: str) -> None:
    """A client that trains on a sample of one token has one: the trained tokens end before the sample's last."""
    spans = [("prompt_tokens", "unknown", 0, 0), ("prompt_tokens", sequence, 0, 3), ("sampled_tokens", sequence, 0, 0)]
    model = api.model()
    with_empty, without = spanned(model, 1, PROMPT, *spans), spanned(model, 2, PROMPT, spans[1])
    answers = [api.forward_backward(message) for message in (with_empty, without)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].json
    first, second = (api.services.oplog.entry(model, seq).payload for seq in (1, 2))
    assert first == second


def test_a_span_of_no_kind_is_refused(api: Api) -> None:
    message = batch(api.model(), 1)
    message.data[0].model_input_spans.add()
    answer = api.forward_backward(message)
    assert (answer.status_code, "neither prompt_tokens nor sampled_tokens" in answer.json["detail"]) == (400, True)


def test_routes_beyond_the_limit_of_a_call_are_refused(
    api: Api, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MAX_ROUTE_BYTES", 12)
    message = spanned(api.model(), 1, PROMPT, ("prompt_tokens", sequence, 0, 3))
    assert api.forward_backward(message).status_code == 200
    message = spanned(
        message.model_id, 2, [*PROMPT, 8], ("prompt_tokens", sequence, 0, 3), ("sampled_tokens", sequence, 0, 1)
    )
    answer = api.forward_backward(message)
    assert answer.json["detail"] == "the routes of this batch take 16 bytes, more than 12; send fewer datums"


def test_more_spans_than_a_call_may_have_are_refused(api: Api, sequence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MAX_SPANS", 1)
    spans = [("prompt_tokens", sequence, 0, 3), ("sampled_tokens", sequence, 0, 3)]
    answer = api.forward_backward(spanned(api.model(), 1, [*PROMPT, *SAMPLE], *spans))
    assert answer.json["detail"] == "the batch has 2 model_input_spans, more than 1; send fewer datums"


def test_without_the_setting_spans_are_ignored(api: Api, plain_app: Flask) -> None:
    plain = dataclasses.replace(api, client=plain_app.test_client())
    model = plain.model()
    assert plain.forward_backward(spanned(model, 1, PROMPT, ("prompt_tokens", "unknown", 9, 9))).status_code == 200
    without = batch(model, 2, tokens=PROMPT, target_tokens=[1] * 3)
    assert plain.forward_backward(without).status_code == 200
    entries = [api.services.oplog.entry(model, seq) for seq in (1, 2)]
    assert entries[0].payload == entries[1].payload


def test_a_batch_as_json_has_no_routes(api: Api) -> None:
    model = api.model()
    datum = {
        "model_input": {"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
        "loss_fn_inputs": {"target_tokens": {"data": [1, 1, 1], "dtype": "int64", "shape": [3]}},
    }
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    answer = api.post("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": content})
    assert answer.status_code == 200, answer.json
    assert routes_of(api, model) is None
