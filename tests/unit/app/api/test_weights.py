from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyrage
import pytest
from tinker.types.checkpoints_list_response import CheckpointsListResponse
from tinker.types.training_run import TrainingRun

from app import ids
from app.domain import ops
from app.domain.records import Checkpoint, Sampler
from app.ids import TinkerPath
from app.settings import EngineSettings
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from tests import ssh_keys
from tests.unit.app.api.test_copies import rebuilt, saved
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api


def op_of(api: Api, model: str, seq: int) -> ops.Op:
    entry = api.services.oplog.entry(model, seq)
    assert entry is not None
    return ops.decode(entry.payload)


def test_each_way_of_saving_is_its_own_kind(api: Api) -> None:
    model = api.model()
    body = {"model_id": model, "path": "ck.1", "ttl_seconds": 7200, "user_metadata": {"step": "1"}}
    for seq, path in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"), start=1):
        assert api.post(path, {**body, "seq_id": seq}).json["request_id"] == f"{model}:{seq}"
    kinds = ("weights", "sampler_weights", "external_weights")
    expected = [ops.SaveWeights(kind, "ck.1", 7200, False, {"step": "1"}) for kind in kinds]
    assert [op_of(api, model, seq) for seq in (1, 2, 3)] == expected


def test_an_overwriting_save_says_so(api: Api) -> None:
    model = api.model()
    api.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a", "overwrite": True})
    assert op_of(api, model, 1) == ops.SaveWeights("weights", "a", overwrite=True)


@pytest.mark.parametrize(
    ("asked", "inflight"), [({}, False), ({"kind": "snapshot"}, False), ({"kind": "inflight"}, True)]
)
def test_weights_for_a_sampling_session_stay_or_follow_the_newest(
    api: Api, asked: dict[str, str], inflight: bool
) -> None:
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, **asked}
    assert api.post("save_weights_for_sampler", body).status_code == 200
    saved = op_of(api, model, 1)
    assert isinstance(saved, ops.SaveWeights) and saved.inflight == inflight


def test_a_repeated_save_whose_sampling_session_was_removed_makes_none(api: Api) -> None:
    """It is removed a day after its adapter was deleted."""
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    saved = api.post("save_weights_for_sampler", body).json
    sampler = ids.sampling_session_id(ids.session_of(model), 0)
    prefix = f"models/{model}/sampler_weights/ephemeral-1/1-1"
    project = api.services.authenticator(api.key).project
    record = dump(Sampler(project, ids.session_of(model), BASE, 0.0, prefix=prefix))
    api.commit(model, 1, writes=[(Sampler.namespace, sampler, record)])
    assert api.get(f"samplers/{sampler}").status_code == 200
    with connect(api.services.settings.redis.url) as client:
        lifecycle = RedisLifecycle(client, EngineSettings(ephemeral_s=0.001))
        assert lifecycle.end_unused_samplers([sampler], copies=False) == 1
    assert api.post("save_weights_for_sampler", body).json == saved
    assert api.get(f"samplers/{sampler}").status_code == 404
    asked = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "sampling_params": {"max_tokens": 1}}
    late = api.post("asample", {**asked, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}})
    assert (late.status_code, late.json["detail"]) == (404, f"sampler '{sampler}' does not exist")


EXPORTS: dict[str, tuple[dict[str, str], dict[str, str], bool]] = {
    "nothing said": ({}, {}, False),
    "when it was created": ({"export_format": "huggingface"}, {}, True),
    "with the call": ({}, {"format": "huggingface"}, True),
    "the call overrules": ({"export_format": "huggingface"}, {"format": "peft"}, False),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_is_the_adapter_unless_the_merged_model_is_asked_for(api: Api, case: str) -> None:
    metadata, body, merged = EXPORTS[case]
    model = api.model(user_metadata=metadata)
    for seq, path in enumerate(("save_weights_external", "save_weights", "save_weights_for_sampler"), start=1):
        assert api.post(path, {"model_id": model, "seq_id": seq, "path": "a", **body}).status_code == 200
    assert [op_of(api, model, seq).merged for seq in (1, 2, 3)] == [merged, False, False]


def test_an_unknown_form_is_refused_when_the_model_is_created(api: Api) -> None:
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": BASE}
    answer = api.post("create_model", {**body, "user_metadata": {"export_format": "gguf"}})
    assert (answer.status_code, "'gguf'" in answer.json["detail"]) == (400, True)


def test_a_model_whose_every_weight_is_trained_has_no_peft_files_and_needs_no_merging(api: Api) -> None:
    model = api.model()
    api.services.records.update("models", model, {"full": "true"})
    for seq, form in enumerate((None, "huggingface"), start=1):
        body = {"model_id": model, "seq_id": seq, "path": "a", "format": form}
        assert api.post("save_weights_external", body).status_code == 200
        assert not op_of(api, model, seq).merged
    answer = api.post("save_weights_external", {"model_id": model, "seq_id": 3, "path": "a", "format": "peft"})
    assert (answer.status_code, "export it as huggingface" in answer.json["detail"]) == (400, True)


def test_a_critic_has_no_merged_model(api: Api) -> None:
    model = api.model()
    api.services.records.update("models", model, {"critic": "true"})
    answer = api.post("save_weights_external", {"model_id": model, "seq_id": 1, "path": "a", "format": "huggingface"})
    assert (answer.status_code, "value head" in answer.json["detail"]) == (400, True)


def test_a_merged_model_is_neither_loaded_nor_sampled(api: Api) -> None:
    model = api.model()
    path = save_checkpoint(api, model, "external_weights", files=["config.json", "model.safetensors"])
    session = {"session_id": api.session()}
    answers = [
        api.post("load_weights", {"model_id": model, "seq_id": 1, "path": path}),
        api.post("load_weights", {**session, "model_seq_id": 0, "path": path}),
        api.post("create_sampling_session", {**session, "sampling_session_seq_id": 0, "model_path": path}),
    ]
    assert [(answer.status_code, "can only be downloaded" in answer.json["detail"]) for answer in answers] == 3 * [
        (400, True)
    ]


def test_an_export_for_recipients_names_each_once(api: Api) -> None:
    model = api.model()
    first, second = sorted(str(pyrage.x25519.Identity.generate().to_public()) for _ in range(2))
    body = {"model_id": model, "seq_id": 1, "path": "a"}
    answers = [
        api.post("save_weights_external", {**body, "age_encryption_recipients": asked})
        for asked in ([second, first, second], [first, second])
    ]
    assert answers[0].json == answers[1].json, "the same call"
    assert op_of(api, model, 1) == ops.SaveWeights("external_weights", "a", recipients=(first, second))


@pytest.mark.parametrize("kind", ssh_keys.KINDS)
def test_an_export_for_an_ssh_key_is_taken(api: Api, kind: str) -> None:
    model, public = api.model(), ssh_keys.generate(kind).public
    body = {"model_id": model, "seq_id": 1, "path": "a", "age_encryption_recipients": [public]}
    assert api.post("save_weights_external", body).status_code == 200
    assert op_of(api, model, 1) == ops.SaveWeights("external_weights", "a", recipients=(public,))


def test_an_encrypted_checkpoint_is_neither_loaded_nor_sampled(api: Api) -> None:
    model = api.model()
    path = save_checkpoint(api, model, "external_weights", files=["adapter_model.safetensors.age"])
    session = {"session_id": api.session()}
    answers = [
        api.post("load_weights", {"model_id": model, "seq_id": 1, "path": path}),
        api.post("load_weights", {**session, "model_seq_id": 0, "path": path}),
        api.post("create_sampling_session", {**session, "sampling_session_seq_id": 0, "model_path": path}),
    ]
    assert [(answer.status_code, "encrypted" in answer.json["detail"]) for answer in answers] == 3 * [(400, True)]


BAD_SAVES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "name with a slash": ("save_weights", {"path": "a/b"}, 400, "a/b"),
    "dots": ("save_weights", {"path": ".."}, 400, ".."),
    "no name": ("save_weights", {}, 422, "path"),
    "short ttl": ("save_weights", {"path": "a", "ttl_seconds": 60}, 400, "ttl_seconds 60"),
    "metadata no text": ("save_weights", {"path": "a", "user_metadata": {"a": 1}}, 422, "user_metadata"),
    "half of a pair": ("save_weights", {"path": "a", "user_metadata": {"a": "\ud800"}}, 400, "surrogate pair"),
    "half of a pair by name": (
        "save_weights",
        {"path": "a", "user_metadata": {"\ud800": 1}},
        422,
        "user_metadata.\ud800",
    ),
    "no age key": ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1x"]}, 400, "'age1x'"),
    "a malformed ssh key": (
        "save_weights_external",
        {"path": "a", "age_encryption_recipients": ["ssh-rsa AAAAB3NzaC1yc2EAAAABAA=="]},
        400,
        "is not an age recipient",
    ),
    "too many readers": ("save_weights_external", {"path": "a", "age_encryption_recipients": ["a"] * 11}, 422, "age_"),
    "form": ("save_weights_external", {"path": "a", "format": "gguf"}, 400, "'gguf'"),
    "of an unknown kind": (
        "save_weights_for_sampler",
        {"sampling_session_seq_id": 0, "kind": "sideways"},
        422,
        "snapshot, inflight",
    ),
    "neither": ("save_weights_for_sampler", {"kind": "snapshot"}, 400, "sampling_session_seq_id"),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_a_bad_save_is_refused_and_its_seq_consumed(api: Api, case: str) -> None:
    path, change, status, word = BAD_SAVES[case]
    model = api.model()
    answer = api.post(path, {"model_id": model, "seq_id": 1, **change})
    assert (answer.status_code, word in answer.json["detail"]) == (status, True), answer.json
    assert api.services.oplog.entry(model, 1).kind == "skip"


def test_a_model_loads_a_checkpoint_in_its_order(api: Api) -> None:
    model = api.model()
    path = save_checkpoint(api, model)
    answer = api.post("load_weights", {"model_id": model, "seq_id": 1, "path": path, "optimizer": True})
    assert answer.json["request_id"] == f"{model}:1"
    assert op_of(api, model, 1) == ops.LoadWeights(path, True, "checkpoints/x")


@pytest.mark.parametrize("change", [{}, {"seq_id": 0}, {"seq_id": 1}, {"model_seq_id": -1, "seq_id": 1}])
def test_a_load_names_a_model_or_a_session_and_never_both(api: Api, change: dict[str, int]) -> None:
    model, session = api.model(), api.session()
    both = {"model_id": model, "session_id": session, "model_seq_id": 0, "path": save_checkpoint(api, model)}
    answer = api.post("load_weights", {**both, **change})
    assert (answer.status_code, "seq_id" in answer.json["detail"]) == (422, True), answer.json
    assert api.post("get_info", {"model_id": f"{session}:train:0"}).status_code == 404
    late = api.post("optim_step", {"model_id": model, "seq_id": 1})
    assert late.status_code == (400 if change.get("seq_id") == 1 else 200), "a 422 consumes a seq, and nothing else"


@pytest.mark.parametrize("changes", [{"owner": "somebody"}, {"expires_at": 1.0}, {"base_model": "org/else"}])
def test_loading_what_is_not_there_consumes_the_seq(api: Api, changes: dict[str, Any]) -> None:
    model = api.model()
    path = save_checkpoint(api, model, **changes)
    assert api.post("load_weights", {"model_id": model, "seq_id": 1, "path": path}).status_code == 400
    assert api.services.oplog.entry(model, 1).kind == "skip"


def test_a_run_shows_its_checkpoints(api: Api) -> None:
    model = api.model(user_metadata={"renderer_name": "role_colon"})
    paths = [save_checkpoint(api, model), save_checkpoint(api, model, "sampler_weights", created=2.0)]
    save_checkpoint(api, model, "external_weights", expires_at=1.0)
    save_checkpoint(api, api.model())
    listed = CheckpointsListResponse(**api.get(f"training_runs/{model}/checkpoints").json)
    assert [c.tinker_path for c in listed.checkpoints] == paths[::-1]
    assert listed.checkpoints[1].checkpoint_id == "weights/a"
    run = TrainingRun(**api.get(f"training_runs/{model}?access_scope=owned").json)
    assert (run.training_run_id, run.base_model, run.is_lora) == (model, BASE, True)
    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert run.last_checkpoint.tinker_path == paths[0]
    assert run.last_sampler_checkpoint.tinker_path == paths[1]


def test_a_ttl_is_set_counted_from_now_and_removed(api: Api) -> None:
    model = api.model()
    save_checkpoint(api, model)
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a/ttl"
    headers = {"X-API-Key": api.key}

    def expiry() -> str | None:
        return api.get(f"training_runs/{model}/checkpoints").json["checkpoints"][0].get("expires_at")

    assert api.client.put(url, json={"ttl_seconds": 3600}, headers=headers).status_code == 200
    assert 3500 < datetime.fromisoformat(expiry()).timestamp() - time.time() <= 3600
    assert api.client.put(url, json={"ttl_seconds": 5}, headers=headers).status_code == 400
    assert api.client.put(url, json={"ttl_seconds": None}, headers=headers).status_code == 200
    assert expiry() is None
    checkpoint = api.services.records.find(Checkpoint, f"tinker://{model}/weights/a")
    assert checkpoint is not None and not checkpoint.counts, "its owner keeps it, whatever keep_checkpoints is"


@pytest.mark.parametrize(("method", "tail"), [("PUT", "ttl"), ("POST", "publish"), ("DELETE", "publish")])
def test_a_change_of_a_checkpoint_that_is_deleted_meanwhile_finds_none(
    api: Api, monkeypatch: pytest.MonkeyPatch, method: str, tail: str
) -> None:
    """The change is noted in the object store before the record; the deletion falls between the two."""
    model = api.model()
    path = save_checkpoint(api, model)
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    body = {"json": {"ttl_seconds": None}} if tail == "ttl" else {}
    put_new = api.services.objects.put_new

    def deleted_behind(key: str, source: Path | bytes) -> bool:
        done = put_new(key, source)
        api.services.records.delete(Checkpoint.namespace, path)
        return done

    def change() -> tuple[int, dict[str, Any]]:
        answer = api.client.open(f"{url}/{tail}", method=method, headers={"X-API-Key": api.key}, **body)
        return answer.status_code, answer.json

    monkeypatch.setattr(api.services.objects, "put_new", deleted_behind)
    refused = change()
    assert refused[0] == 404
    assert refused == change(), "it answers as for a checkpoint that never was"
    assert api.services.records.get(Checkpoint.namespace, path) is None


@pytest.mark.parametrize(("method", "tail"), [("PUT", "ttl"), ("POST", "publish")])
def test_a_change_of_a_checkpoint_that_is_overwritten_meanwhile_is_made_to_the_new_save_and_outlives_a_rebuild(
    api: Api, state_url: str, monkeypatch: pytest.MonkeyPatch, method: str, tail: str
) -> None:
    path = saved(api)
    model = TinkerPath.parse(path).model_id
    put_new = api.services.objects.put_new

    def overwritten_behind(key: str, source: Path | bytes) -> bool:
        done = put_new(key, source)
        monkeypatch.undo()
        saved(api, model, 2)
        return done

    def change() -> tuple[bool, bool]:
        found = api.services.records.find(Checkpoint, path)
        assert found is not None and found.prefix.endswith("/2-1")
        return found.expires_at is not None, found.public

    monkeypatch.setattr(api.services.objects, "put_new", overwritten_behind)
    body = {"json": {"ttl_seconds": 3600}} if tail == "ttl" else {}
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a/{tail}"
    assert api.client.open(url, method=method, headers={"X-API-Key": api.key}, **body).status_code == 200
    expected = (tail == "ttl", tail == "publish")
    assert change() == expected
    rebuilt(api, state_url, emptied=True)
    assert change() == expected


def test_an_external_checkpoint_downloads_without_a_key(api: Api) -> None:
    model = api.model()
    api.services.objects.put_new("external/1/adapter_config.json", b'{"r": 4}')
    save_checkpoint(api, model, "external_weights", prefix="external/1")
    answer = api.get(f"training_runs/{model}/checkpoints/external_weights/a/external_weights_urls")
    url = urlsplit(answer.json["urls"]["adapter_config.json"])
    ends = (datetime.fromisoformat(answer.json["expires"]).timestamp(), int(parse_qs(url.query)["expires"][0]))
    assert all(3500 < end - time.time() <= 3600 for end in ends)
    download = api.client.get(f"{url.path}?{url.query}")
    assert (download.status_code, download.data) == (200, b'{"r": 4}')
    forged = api.client.get(f"{url.path}?{url.query.replace('signature=', 'signature=0')}")
    assert forged.status_code == 403
    unsigned = api.client.get(url.path)
    assert unsigned.status_code == 422


def test_a_download_comes_in_chunks_and_says_its_size_where_none_come(api: Api) -> None:
    api.services.objects.put_new("a/file", b"12345678")
    url = urlsplit(api.services.objects.presign("a/file", 60))
    path = f"{url.path}?{url.query}"
    whole = api.client.get(path)
    assert (whole.data, whole.content_length) == (b"12345678", None)
    part = api.client.get(path, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.data, part.content_length) == (206, b"345", None)
    assert part.headers["Content-Range"] == "bytes 2-4/8"
    assert api.client.head(path).content_length == 8
    old = api.client.get(path, environ_overrides={"SERVER_PROTOCOL": "HTTP/1.0"})
    assert (old.data, old.content_length) == (b"12345678", 8)


def test_only_external_checkpoints_are_for_download(api: Api) -> None:
    model = api.model()
    save_checkpoint(api, model)
    answer = api.get(f"training_runs/{model}/checkpoints/weights/a/external_weights_urls")
    assert (answer.status_code, "save_weights_external" in answer.json["detail"]) == (400, True)


CHECKPOINT_ROUTES = [
    ("GET", ""),
    ("GET", "/checkpoints"),
    ("PUT", "/checkpoints/weights/a/ttl"),
    ("DELETE", "/checkpoints/weights/a"),
    ("GET", "/checkpoints/weights/a/external_weights_urls"),
]


@pytest.mark.parametrize(("method", "tail"), CHECKPOINT_ROUTES)
def test_another_ones_run_looks_missing(api: Api, stranger: Api, method: str, tail: str) -> None:
    model = api.model()
    path = save_checkpoint(api, model)

    def ask(who: Api) -> tuple[int, bytes]:
        url = f"/api/v1/training_runs/{model}{tail}"
        answer = who.client.open(url, method=method, headers={"X-API-Key": who.key}, json={})
        return answer.status_code, answer.data

    foreign = ask(stranger)
    api.services.records.delete("models", model)
    api.services.records.delete("checkpoints", path)
    assert foreign == ask(api)
    assert foreign[0] == 404


def test_a_retried_load_is_the_same_call_though_its_path_was_overwritten_since(api: Api) -> None:
    model = api.model()
    path = save_checkpoint(api, model)
    body = {"model_id": model, "path": path, "seq_id": 1, "optimizer": True}
    first = api.post("load_weights", body)
    api.services.records.update("checkpoints", path, {"prefix": '"checkpoints/newer"'})
    assert api.post("load_weights", body).json == first.json
    assert op_of(api, model, 1).prefix == "checkpoints/x", "it loads what the path named when it was called"


def test_a_retried_load_is_the_same_call_though_its_checkpoint_was_deleted_since(api: Api) -> None:
    model = api.model()
    path = save_checkpoint(api, model)
    body = {"model_id": model, "path": path, "seq_id": 1, "optimizer": True}
    first = api.post("load_weights", body)
    api.services.records.delete("checkpoints", path)
    again, other = api.post("load_weights", body), api.post("load_weights", {**body, "optimizer": False})
    assert (again.status_code, again.json) == (200, first.json)
    assert (other.status_code, "does not exist" in other.json["detail"]) == (400, True)
    assert api.services.oplog.outcome(first.json["request_id"]) is None, "it still waits for its turn"


def test_a_retried_save_for_sampling_is_the_same_call_though_the_sdk_numbers_it_anew(api: Api) -> None:
    model = api.model()
    save = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
    first, again = (api.post("save_weights_for_sampler", {**save, "sampling_session_seq_id": n}) for n in (3, 4))
    assert (first.status_code, first.json) == (again.status_code, again.json) == (200, first.json)
    op = ops.decode(api.services.oplog.entry(model, 1).payload)
    assert op.sampling_session_id.endswith(":3"), "the first one stands"
