from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from app import create_app, ids
from app.api.base import EXTENSION
from app.domain import ops
from app.domain.records import Sampler, Worker
from app.domain.results import PROTOBUF, Result
from app.domain.sampling import SampleRequest
from app.settings import SamplerSettings, Settings
from app.stores.redis.records import dump
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import API, BASE, CONTEXT, KEY, VOCAB, Api


def body(sampler: str, **changes: Any) -> dict[str, Any]:
    """A request with every key the SDK sends."""
    return {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "stop": ["x"], "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
        **changes,
    }


def admitted(api: Api, request_id: str) -> SampleRequest:
    entry = api.services.oplog.claim_sample(request_id, "node/test")
    assert entry is not None
    return ops.decode(entry.payload)


def test_a_sample_is_admitted_with_an_id_for_each_sequence(api: Api) -> None:
    sampler = api.sampler()
    answer = api.post("asample", body(sampler))
    request_id = f"{sampler}:0"
    assert answer.json == {"request_id": request_id, "sample_sequence_ids": [f"{request_id}-0", f"{request_id}-1"]}
    request = admitted(api, request_id)
    assert request.prompt.dtype == np.int32
    assert request.prompt.tolist() == [1, 2, 3]
    assert (request.num_samples, request.max_tokens, request.stop_strings) == (2, 4, ("x",))
    assert request.seed == ids.stable_seed(request_id)


def test_a_sampler_that_goes_while_it_is_asked_samples_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell which weights to use any more: the base model's would be wrong."""
    sampler, bases = api.sampler(), api.services.bases
    known = bases.info

    def info(role: str, name: str) -> Any:
        api.services.records.delete("samplers", sampler)
        return known(role, name)

    monkeypatch.setattr(bases, "info", info)
    meanwhile = api.post("asample", body(sampler))
    monkeypatch.undo()
    missing = api.post("asample", body(sampler))
    assert (meanwhile.status_code, meanwhile.data) == (404, missing.data)
    assert api.services.oplog.pending() == []


def test_a_retried_sample_returns_the_original_future(api: Api) -> None:
    sampler = api.sampler()
    first, again = api.post("asample", body(sampler)), api.post("asample", body(sampler))
    assert first.json == again.json
    assert len(api.services.oplog.pending()) == 1
    assert api.post("asample", body(sampler, num_samples=3)).status_code == 400


def test_a_samples_result_reaches_its_poll(api: Api) -> None:
    request_id = api.post("asample", body(api.sampler())).json["request_id"]
    assert api.services.oplog.finish_sample(request_id, Result(b"done", PROTOBUF))
    answer = api.post("retrieve_future", {"request_id": request_id})
    assert (answer.status_code, answer.data, answer.content_type) == (200, b"done", PROTOBUF)


STOPS = {
    "absent": (None, (), (), False),
    "a string": ("ab", ("ab",), (), False),
    "strings": (["a", "b"], ("a", "b"), (), False),
    "tokens": ([1, 2], (), (1, 2), False),
    "none at all": ([], (), (), True),
}


@pytest.mark.parametrize("case", STOPS)
def test_every_form_of_stop_is_understood(api: Api, case: str) -> None:
    stop, strings, tokens, ignore_eos = STOPS[case]
    params = {"max_tokens": 4, **({} if stop is None else {"stop": stop})}
    request_id = api.post("asample", body(api.sampler(), sampling_params=params)).json["request_id"]
    request = admitted(api, request_id)
    assert (request.stop_strings, request.stop_tokens, request.ignore_eos) == (strings, tokens, ignore_eos)


@pytest.mark.parametrize("max_tokens", [None, CONTEXT * 10])
def test_sampling_ends_with_the_context(api: Api, max_tokens: int | None) -> None:
    params = {} if max_tokens is None else {"max_tokens": max_tokens}
    request_id = api.post("asample", body(api.sampler(), sampling_params=params)).json["request_id"]
    assert admitted(api, request_id).max_tokens == CONTEXT - 3


def test_a_clients_seed_and_a_clones_seq_are_kept(api: Api) -> None:
    sampler = api.sampler()
    asked = body(sampler, seq_id=10**18, prompt_logprobs=True, sampling_params={"max_tokens": 1, "seed": 2**62})
    assert api.post("asample", asked).status_code == 200
    request = admitted(api, f"{sampler}:{10**18}")
    assert (request.seed, request.prompt_logprobs) == (2**62, True)


TARGETS = {"data": [5, -1, 7, 8], "dtype": "int64", "shape": [2, 2]}
SPARSE = {
    "data": [5, 9],
    "dtype": "int64",
    "shape": [2, 1000],
    "sparse_crow_indices": [0, 0, 2],
    "sparse_col_indices": [3, 999],
}


def test_everything_that_can_be_asked_reaches_the_sampler(api: Api) -> None:
    asked = {
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 2,
        "topk_prompt_logprobs": 100,
        "topk_sample_logprobs": VOCAB,
        "prompt_alt_tokens_k": 7,
        "target_prompt_logprobs": TARGETS,
    }
    request = admitted(api, api.post("asample", body(api.sampler(), **asked)).json["request_id"])
    assert (request.prompt_logprobs, request.prompt_last_n, request.prompt_top) == (True, 2, 100)
    assert (request.sample_top, request.prompt_alternatives) == (VOCAB, 7)
    cells = request.prompt_targets
    assert (cells.values.tolist(), cells.starts.tolist(), cells.width, cells.columns) == (
        [5, -1, 7, 8],
        [0, 2, 4],
        2,
        None,
    )


def test_sparse_targets_are_kept_as_sparse(api: Api) -> None:
    asked = body(api.sampler(), target_prompt_logprobs=SPARSE)
    cells = admitted(api, api.post("asample", asked).json["request_id"]).prompt_targets
    assert (cells.values.tolist(), cells.starts.tolist()) == ([5, 9], [0, 0, 2])
    assert (cells.width, cells.columns.tolist()) == (1000, [3, 999])


def test_a_request_that_asks_for_none_of_it_has_none(api: Api) -> None:
    asked = dict.fromkeys(("topk_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"))
    request = admitted(api, api.post("asample", body(api.sampler(), **asked)).json["request_id"])
    assert (request.prompt_last_n, request.prompt_top, request.prompt_alternatives) == (0, 0, 0)
    assert (request.sample_top, request.prompt_targets) == (0, None)


def prompt(tokens: list[Any]) -> dict[str, Any]:
    return {"prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}}


BAD: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "token too large": (prompt([1, VOCAB]), 400, ["position 1", str(VOCAB)]),
    "token negative": (prompt([-1]), 400, ["position 0", "-1"]),
    "token text": (prompt(["a"]), 400, ["tokens"]),
    "records for a proprietary loss": (
        {"record_stability_info": True},
        400,
        ["record_stability_info", "stable_reinforce", "loss_fn=importance_sampling"],
    ),
    "no prompt": (prompt([]), 400, ["prompt is empty"]),
    # tinker-cookbook's proxy and Anthropic's clients know a full context by these words.
    "no room": (
        prompt([1] * CONTEXT),
        400,
        [
            f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum. Prompt length plus max_tokens exceeds the "
            f"model's context window: {CONTEXT} prompt tokens + 1 max_tokens > {CONTEXT}"
        ],
    ),
    "no room to score": (
        {**prompt([1] * (CONTEXT + 1)), "prompt_logprobs": True},
        400,
        [f"prompt is too long: {CONTEXT + 1} tokens > {CONTEXT} maximum"],
    ),
    "an image": ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, 400, ["image"]),
    "no samples": ({"num_samples": 0}, 400, ["num_samples 0"]),
    "too many samples": ({"num_samples": 5000}, 400, ["5000", "1024"]),
    "no tokens": ({"sampling_params": {"max_tokens": 0}}, 400, ["max_tokens 0"]),
    "cold": ({"sampling_params": {"temperature": -0.1}}, 400, ["temperature -0.1"]),
    "hot": ({"sampling_params": {"temperature": 2.5}}, 400, ["temperature 2.5", "at most 2"]),
    "top_p 0": ({"sampling_params": {"top_p": 0.0}}, 400, ["top_p 0.0"]),
    "top_p 2": ({"sampling_params": {"top_p": 2.0}}, 400, ["top_p 2.0"]),
    "top_k 0": ({"sampling_params": {"top_k": 0}}, 400, ["top_k 0", "at least 1", "-1 means off"]),
    "top_k 2^31": ({"sampling_params": {"top_k": 2**31}}, 400, ["top_k 2147483648", "at most 2147483647"]),
    "mixed stops": ({"sampling_params": {"stop": ["a", 1]}}, 400, ["stop", "got ['a', 1]"]),
    "a long wrong stop": ({"sampling_params": {"stop": {"a": "x" * 999}}}, 400, [f"got {{'a': '{'x' * 73})"]),
    "empty stop": ({"sampling_params": {"stop": [""]}}, 400, ["stop"]),
    "stop outside": ({"sampling_params": {"stop": [VOCAB]}}, 400, [str(VOCAB)]),
    "negative seed": ({"sampling_params": {"seed": -1}}, 422, ["seed", "-1"]),
    "a long stop": ({"sampling_params": {"stop": ["é" * 513]}}, 400, ["stop", "1026 bytes", "1024"]),
    "many stops": ({"sampling_params": {"stop": ["a"] * 65}}, 400, ["stop", "65", "64"]),
    "wide top-k": ({"topk_prompt_logprobs": VOCAB + 1}, 400, ["topk_prompt_logprobs", str(VOCAB + 1)]),
    "negative top-k": ({"topk_sample_logprobs": -1}, 400, ["topk_sample_logprobs -1"]),
    "top-k no number": ({"topk_sample_logprobs": "5"}, 422, ["topk_sample_logprobs"]),
    "negative alternatives": ({"prompt_alt_tokens_k": -2}, 400, ["prompt_alt_tokens_k -2"]),
    "too many alternatives": ({"prompt_alt_tokens_k": 2**21 + 1}, 400, ["prompt_alt_tokens_k", "4194306", "4194304"]),
    # A prompt of one token has no position for them.
    "alternatives of 0": ({**prompt([1]), "prompt_alt_tokens_k": 2**63}, 400, [f"tokens_k {2**63}", "at most 4194304"]),
    "top-k of too much": (
        {"topk_sample_logprobs": VOCAB, "num_samples": 1024, "sampling_params": {"max_tokens": 60}},
        400,
        ["topk_sample_logprobs", str(VOCAB * 1024 * 60)],
    ),
    "last n alone": ({"prompt_logprobs_last_n": 1}, 400, ["prompt_logprobs_last_n needs prompt_logprobs"]),
    "last 0": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, 400, ["prompt_logprobs_last_n 0"]),
    "last 3 of 3": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, 400, ["last_n 3", "at most 2"]),
    "targets no tensor": ({"target_prompt_logprobs": [1]}, 400, ["target_prompt_logprobs"]),
    "targets of floats": ({"target_prompt_logprobs": {**TARGETS, "dtype": "float32"}}, 400, ["int64"]),
    "targets of one size": ({"target_prompt_logprobs": {**TARGETS, "shape": [4]}}, 400, ["[4]"]),
    "targets a row too many": ({"target_prompt_logprobs": {**TARGETS, "shape": [4, 1]}}, 400, ["4 rows", "needs 2"]),
    # With as many rows as fit a shape, the array of row starts took 16 GiB.
    "targets without columns": (
        {"target_prompt_logprobs": {**TARGETS, "data": [], "shape": [2, 0]}},
        400,
        ["[2, 0]", "no columns"],
    ),
    "targets outside": (
        {"target_prompt_logprobs": {**TARGETS, "data": [1, 2, 3, VOCAB]}},
        400,
        ["row 1", f"token {VOCAB}", f"0..{VOCAB - 1}"],
    ),
    "targets below -1": ({"target_prompt_logprobs": {**TARGETS, "data": [1, -2, 3, 4]}}, 400, ["row 0", "token -2"]),
    "targets of nothing": ({"target_prompt_logprobs": {**TARGETS, "data": [-1] * 4}}, 400, ["no token id"]),
    "targets beside their columns": (
        {"target_prompt_logprobs": {**SPARSE, "sparse_col_indices": [3, 1000]}},
        400,
        ["col_indices"],
    ),
    "targets with odd rows": (
        {"target_prompt_logprobs": {**SPARSE, "sparse_crow_indices": [0, 3, 2]}},
        400,
        ["crow_indices"],
    ),
    "no seq": ({"seq_id": None}, 422, ["seq_id"]),
    "prompt no object": ({"prompt": 5}, 422, ["prompt"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_sample_is_refused_by_name_and_nothing_is_enqueued(api: Api, case: str) -> None:
    change, status, words = BAD[case]
    sampler = api.sampler()
    answer = api.post("asample", body(sampler, **change))
    assert answer.status_code == status, answer.json
    assert all(word in answer.json["detail"] for word in words), answer.json
    assert api.services.oplog.pending() == []
    assert api.post("asample", body(sampler)).status_code == 200


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"max_tokens": 50}, {}])
def test_a_prompt_that_fills_the_context_may_be_scored(api: Api, params: dict[str, Any]) -> None:
    """Programs score a prompt with its sample, and the sample may end with the context."""
    sampler = api.sampler()
    full = {**prompt([1] * CONTEXT), "prompt_logprobs": True, "sampling_params": params}
    answer = api.post("asample", body(sampler, **full))
    assert answer.status_code == 200, answer.json
    request = admitted(api, answer.json["request_id"])
    assert (len(request.prompt), request.max_tokens) == (CONTEXT, 1)


def test_a_sampler_of_a_checkpoint_knows_its_base(api: Api) -> None:
    path = save_checkpoint(api, api.model(), "sampler_weights")
    asked = {"session_id": api.session(), "sampling_session_seq_id": 4, "model_path": path}
    sampler = api.post("create_sampling_session", asked).json["sampling_session_id"]
    assert sampler == f"{asked['session_id']}:sample:4"
    expected = {"sampler_id": sampler, "base_model": BASE, "model_path": path}
    assert api.get(f"samplers/{sampler}").json == expected
    assert api.services.records.get("samplers", sampler)["prefix"] == '"checkpoints/x"'
    assert api.post("create_sampling_session", asked).json == {"sampling_session_id": sampler}
    other = api.post("create_sampling_session", {**asked, "model_path": None, "base_model": BASE})
    assert other.status_code == 400


BAD_SESSIONS = {
    "nothing to sample": ({}, 400),
    "unknown base": ({"base_model": "org/else"}, 400),
    "no checkpoint": ({"model_path": "tinker://s:train:0/sampler_weights/a"}, 404),
    "no path": ({"model_path": "tinker://../../etc"}, 400),
}


@pytest.mark.parametrize("case", BAD_SESSIONS)
def test_a_sampler_of_nothing_is_refused(api: Api, case: str) -> None:
    change, status = BAD_SESSIONS[case]
    asked = {"session_id": api.session(), "sampling_session_seq_id": 0, **change}
    assert api.post("create_sampling_session", asked).status_code == status


def test_another_ones_sampler_looks_missing(api: Api, stranger: Api) -> None:
    sampler = api.sampler()
    foreign = stranger.post("asample", body(sampler)), stranger.get(f"samplers/{sampler}")
    api.services.records.delete("samplers", sampler)
    missing = api.post("asample", body(sampler)), api.get(f"samplers/{sampler}")
    assert [(a.status_code, a.data) for a in foreign] == [(a.status_code, a.data) for a in missing]
    assert {a.status_code for a in foreign} == {404}


def test_an_ephemeral_save_names_the_sampling_session_to_come(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    asked = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 2, "kind": "snapshot"}
    assert api.post("save_weights_for_sampler", asked).status_code == 200
    entry = api.services.oplog.entry(model, 1)
    assert ops.decode(entry.payload) == ops.SaveWeights(
        "sampler_weights", "ephemeral-1", sampling_session_id=f"{session}:sample:2"
    )


def with_samplers_of_attention_alone(api: Api, settings: Settings) -> Api:
    """The server with samplers that take adapters on attention alone, for models from before them."""
    facts = api.services.records.get(Worker.namespace, "sampler-0")
    info = {**json.loads(facts["info"]), "trainable_groups": ["attn"]}
    api.services.records.put(Worker.namespace, "sampler-0", {**facts, "info": json.dumps(info)})
    app = create_app(settings)
    return Api(app.test_client(), app.extensions[EXTENSION])


def test_an_adapter_that_the_samplers_cannot_apply_has_no_sampler(api: Api, settings: Settings) -> None:
    model = api.model()
    path = save_checkpoint(api, model, "sampler_weights")
    asked = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": path}
    saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 2, "kind": "snapshot"}
    api = with_samplers_of_attention_alone(api, settings)
    for call, body in (("create_sampling_session", asked), ("save_weights_for_sampler", saved)):
        answer = api.post(call, body)
        assert (answer.status_code, "train_mlp" in answer.json["detail"]) == (400, True), call
    save_checkpoint(api, model, "sampler_weights", lora=dataclasses.asdict(ops.LoraSpec(rank=4, train_mlp=False)))
    assert api.post("create_sampling_session", asked).status_code == 200
    kept = api.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "kept"})
    assert kept.status_code == 200, "a save with a path may be sampled elsewhere"


def test_a_repeated_sampler_is_found_even_when_its_checkpoint_has_gone_since(api: Api) -> None:
    path = save_checkpoint(api, api.model(), "sampler_weights")
    asked = {"session_id": api.session(), "sampling_session_seq_id": 4, "model_path": path}
    first = api.post("create_sampling_session", asked)
    api.services.records.delete("checkpoints", path)
    again = api.post("create_sampling_session", asked)
    assert (again.status_code, again.json) == (200, first.json)
    assert api.post("create_sampling_session", {**asked, "sampling_session_seq_id": 5}).status_code == 404


def test_a_sampling_session_id_names_one_sampler_whichever_call_makes_it(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    created = {"session_id": session, "sampling_session_seq_id": 2, "base_model": BASE}
    saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3, "kind": "snapshot"}
    assert api.post("create_sampling_session", created).status_code == 200
    assert api.post("save_weights_for_sampler", saved).status_code == 200
    sampler = f"{session}:sample:3"
    prefix = f"models/{model}/sampler_weights/ephemeral-1/1-1"
    record = Sampler("me", session, BASE, 0.0, prefix=prefix)
    api.commit(model, 1, Result(b"{}"), [("samplers", sampler, dump(record))])

    assert api.post("save_weights_for_sampler", saved).json["request_id"] == f"{model}:1", "a repeat"
    for path, other in (
        ("save_weights_for_sampler", {**saved, "seq_id": 2}),
        ("save_weights_for_sampler", {**saved, "seq_id": 3, "sampling_session_seq_id": 2}),
        ("create_sampling_session", {**created, "sampling_session_seq_id": 3}),
    ):
        answer = api.post(path, other)
        assert (answer.status_code, "already used for another sampler" in answer.json["detail"]) == (400, True), path


@pytest.fixture
def crowded(api: Api, settings: Settings) -> Api:
    """A server that accepts two waiting requests for 100 tokens."""
    small = settings.base_models[0].model_copy(update={"sampler": SamplerSettings(queue_requests=2, queue_tokens=100)})
    app = create_app(settings.model_copy(update={"base_models": (small,)}))
    return Api(app.test_client(), app.extensions[EXTENSION])


def test_a_full_queue_is_a_429_that_consumes_nothing(crowded: Api) -> None:
    sampler = crowded.sampler()
    first = crowded.post("asample", body(sampler)).json["request_id"]
    assert crowded.post("asample", body(sampler, seq_id=1)).status_code == 200
    answer = crowded.post("asample", body(sampler, seq_id=2))
    assert (answer.status_code, answer.json["error"]) == (429, "TooManyRequests")
    assert "sampler.queue_requests" in answer.json["detail"]
    assert float(answer.headers["Retry-After"]) > 0
    assert crowded.post("asample", body(sampler)).json["request_id"] == first, "a repeat has its place already"
    crowded.services.oplog.finish_sample(first, Result(b"x", PROTOBUF))
    assert crowded.post("asample", body(sampler, seq_id=2)).status_code == 200


def test_tokens_count_prompt_and_all_samples(crowded: Api) -> None:
    sampler = crowded.sampler()
    params = {"max_tokens": 30, "stop": []}
    fits = body(sampler, num_samples=3, sampling_params=params)  # 3 + 3 * 30
    assert crowded.post("asample", fits).status_code == 200
    answer = crowded.post("asample", body(sampler, seq_id=1, sampling_params=params))
    assert (answer.status_code, "93 tokens" in answer.json["detail"]) == (429, True)
    never = crowded.post("asample", body(sampler, seq_id=2, num_samples=4, sampling_params=params))
    assert (never.status_code, "123 tokens" in never.json["detail"]) == (400, True)


def test_each_client_that_joins_a_sampler_has_a_number_of_its_own(api: Api, stranger: Api) -> None:
    sampler = api.sampler()
    asked = {"sampling_session_id": sampler, "type": "join_sampling_session"}
    numbers = [api.post("join_sampling_session", asked).json["client_counter"] for _ in range(3)]
    assert numbers == [1, 2, 3]
    foreign = stranger.post("join_sampling_session", asked)
    api.services.records.delete("samplers", sampler)
    missing = api.post("join_sampling_session", asked)
    assert (foreign.status_code, foreign.data) == (404, missing.data)


def test_the_end_of_a_session_or_of_a_run_cancels_what_it_samples(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    record = Sampler("me", session, BASE, 0.0, prefix=f"models/{model}/sampler_weights/ephemeral-1/1-1")
    owner = api.services.records.get("models", model)["owner"]
    ephemeral = f"{session}:sample:9"
    api.services.records.put("samplers", ephemeral, {**dump(record), "owner": owner})
    of_run = api.post("asample", body(ephemeral)).json["request_id"]
    sampler = api.sampler()
    of_session = api.post("asample", body(sampler)).json["request_id"]
    assert api.client.delete(f"{API}/training_runs/{model}", headers={"X-API-Key": KEY}).status_code == 200
    assert api.services.oplog.outcome(of_run).failed
    assert api.services.oplog.outcome(of_session) is None
    finish = {"reason": {"type": "success"}, "detail": None}
    assert api.post(f"sessions/{sampler.partition(':')[0]}/finish", finish).status_code == 200
    assert api.services.oplog.outcome(of_session).failed
