"""An adapter that was trained elsewhere is uploaded by signed URLs, checked, and then a checkpoint like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from werkzeug.test import TestResponse

from app import ids
from app.domain import ops, records
from app.domain.adapters import CONFIG_FILE, TENSORS_FILE
from app.domain.checkpoints import Manifest
from app.domain.records import Upload
from app.errors import Unavailable
from app.services.recovery.rebuild import Rebuild
from app.services.tenants.accounts import AccountService
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from tests.peft_adapters import peft_files
from tests.unit.app.api.test_audit import own
from tests.unit.app.conftest import BASE, SHAPES, Api, add_worker
from tests.unit.app.tenant import Tenant

ALL = {**SHAPES["attn"], **SHAPES["mlp"]}
LORA = {"rank": 4, "train_unembed": False}
FILES = peft_files(ALL, 4)


def start(api: Api, **changes: Any) -> TestResponse:
    return api.post("external_weights_upload_start", {"base_model": BASE, "lora_config": LORA, **changes})


def put(api: Api, url: str, content: bytes) -> TestResponse:
    """Sends a file as a client without a key does."""
    parts = urlsplit(url)
    return api.client.put(f"{parts.path}?{parts.query}", data=content)


def uploaded(api: Api, files: Mapping[str, bytes] = FILES, **changes: Any) -> str:
    """The id of an upload of which all files are there."""
    started = start(api, **changes)
    assert started.status_code == 200, started.json
    assert started.json["urls"].keys() == FILES.keys()
    for name, content in files.items():
        assert put(api, started.json["urls"][name], content).status_code == 200
    return str(started.json["upload_id"])


def finish(api: Api, upload_id: str) -> TestResponse:
    return api.post("external_weights_upload_finish", {"upload_id": upload_id})


def imported(api: Api, **changes: Any) -> str:
    answer = finish(api, uploaded(api, **changes))
    assert answer.status_code == 200, answer.json
    return str(answer.json["tinker_path"])


def staged(api: Api) -> list[str]:
    return api.services.objects.list("uploads/")


@pytest.fixture(autouse=True)
def no_files_of_other_tests(api: Api) -> None:
    api.services.objects.delete(staged(api))


def test_an_upload_becomes_an_external_checkpoint_of_its_base(api: Api) -> None:
    path = imported(api)
    parsed = ids.TinkerPath.parse(path)
    assert parsed.kind == "external_weights"
    [listed] = api.get("checkpoints").json["checkpoints"]
    size = sum(map(len, stored(api, path).values()))
    assert (listed["tinker_path"], listed["base_model"], listed["size_bytes"]) == (path, BASE, size)
    assert listed["checkpoint_type"] == "external"
    run = api.get(f"training_runs/{parsed.model_id}").json
    assert (run["base_model"], run["lora_rank"], run["ended"]) == (BASE, 4, True)
    assert staged(api) == []


def stored(api: Api, path: str) -> dict[str, bytes]:
    prefix = api.services.records.get("checkpoints", path)["prefix"].strip('"')
    return {name: api.services.objects.read(f"{prefix}/{name}") for name in FILES}


def test_the_tensors_are_kept_as_they_were_and_the_configuration_as_the_server_writes_it(api: Api) -> None:
    path = imported(api)
    assert stored(api, path)[TENSORS_FILE] == FILES[TENSORS_FILE]
    config = json.loads(stored(api, path)[CONFIG_FILE])
    assert (config["lora_alpha"], config["base_model_name_or_path"], config["target_modules"]) == (8, BASE, sorted(ALL))
    prefix = api.services.records.get("checkpoints", path)["prefix"].strip('"')
    manifest = Manifest.from_json(api.services.objects.read(f"{prefix}/manifest.json"))
    assert (manifest.path, manifest.base_model, manifest.lora) == (
        path,
        BASE,
        ops.LoraSpec(4, True, True, False, alpha=8),
    )


def test_a_model_starts_from_it_with_its_rank_groups_and_alpha(api: Api) -> None:
    path, session = imported(api), api.session()
    info = api.post("weights_info", {"tinker_path": path}).json
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == (BASE, 4, False)
    body = {"session_id": session, "model_seq_id": 0, "path": path}
    assert api.post("load_weights", {**body, "optimizer": False}).status_code == 200
    op = ops.decode(api.services.oplog.entry(f"{session}:train:0", 0).payload)
    assert op.spec == ops.ModelSpec(BASE, ops.LoraSpec(4, True, True, False, alpha=8.0))
    refused = api.post("load_weights", {**body, "model_seq_id": 1, "optimizer": True})
    assert (refused.status_code, "no optimizer state" in refused.json["detail"]) == (400, True)


def test_a_sampler_of_it_can_be_made(api: Api) -> None:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": imported(api)}
    assert api.post("create_sampling_session", body).status_code == 200


def test_a_repeated_finish_returns_the_same_path_and_changes_nothing(api: Api) -> None:
    upload_id = uploaded(api)
    first, again = finish(api, upload_id), finish(api, upload_id)
    assert (first.status_code, first.data) == (again.status_code, again.data) == (200, first.data)
    assert len(api.get("checkpoints").json["checkpoints"]) == 1


def test_a_finish_that_another_one_overtakes_returns_its_path(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_id, store, answers = uploaded(api), type(api.services.objects), list[TestResponse]()
    get = store.get

    def overtaken(self: Any, *asked: Any) -> None:
        monkeypatch.setattr(store, "get", get)
        answers.append(finish(api, upload_id))
        get(self, *asked)

    monkeypatch.setattr(store, "get", overtaken)
    answers.insert(0, finish(api, upload_id))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].data == answers[1].data


def test_a_finish_that_broke_off_is_made_whole_by_the_next_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_id, store = uploaded(api), type(api.services.objects)
    works = store.put_new

    def away(self: Any, key: str, source: Any) -> bool:
        if key.endswith("manifest.json"):
            raise Unavailable("the object store is away")
        return works(self, key, source)

    monkeypatch.setattr(store, "put_new", away)
    assert finish(api, upload_id).status_code == 503
    assert api.get("checkpoints").json["checkpoints"] == []
    monkeypatch.setattr(store, "put_new", works)
    assert stored(api, finish(api, upload_id).json["tinker_path"])[TENSORS_FILE] == FILES[TENSORS_FILE]


def test_a_file_that_is_sent_again_replaces_the_first(api: Api) -> None:
    started = start(api).json
    for content in (b"nonsense", FILES[TENSORS_FILE]):
        put(api, started["urls"][TENSORS_FILE], content)
    put(api, started["urls"][CONFIG_FILE], FILES[CONFIG_FILE])
    assert finish(api, started["upload_id"]).status_code == 200


def test_after_the_finish_nothing_that_is_sent_changes_the_checkpoint(api: Api) -> None:
    started = start(api).json
    for name, url in started["urls"].items():
        put(api, url, FILES[name])
    path = finish(api, started["upload_id"]).json["tinker_path"]
    put(api, started["urls"][TENSORS_FILE], b"other weights")
    assert stored(api, path)[TENSORS_FILE] == FILES[TENSORS_FILE]
    assert finish(api, started["upload_id"]).json["tinker_path"] == path


WRONG_FILES: dict[str, tuple[Mapping[str, bytes], dict[str, Any], str]] = {
    "no tensors": ({CONFIG_FILE: FILES[CONFIG_FILE]}, {}, f"{TENSORS_FILE} was not uploaded"),
    "nothing": ({}, {}, f"{CONFIG_FILE} was not uploaded"),
    "no safetensors": ({**FILES, TENSORS_FILE: b"PK\3\4 a pickle"}, {}, "not a valid safetensors file"),
    "another rank": (peft_files(ALL, 3), {}, "rank 3, but the upload was started with 4"),
    "another group": (peft_files(SHAPES["attn"], 4), {}, "train_mlp False, but"),
    "DoRA": (peft_files(ALL, 4, use_dora=True), {}, "without use_dora"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_files_of_another_form_are_refused_and_may_be_sent_again(api: Api, case: str) -> None:
    files, changes, words = WRONG_FILES[case]
    upload_id = uploaded(api, files, **changes)
    answer = finish(api, upload_id)
    assert (answer.status_code, words in answer.json["detail"]) == (400, True), answer.json
    assert api.get("checkpoints").json["checkpoints"] == []
    assert api.services.objects.list(f"models/{upload_id}") == []


BAD_STARTS = {
    "unknown base": ({"base_model": "org/else"}, 400, "org/else"),
    "rank too large": ({"lora_config": {"rank": 129}}, 400, "rank 129"),
    "full": ({"lora_config": {"rank": 0}}, 400, "rank 0"),
    "no configuration": ({"lora_config": None}, 422, "lora_config"),
    "nothing to train": ({"lora_config": {"train_mlp": False, "train_attn": False}}, 400, "train_attn, train_mlp"),
    "unknown field": ({"format": "huggingface"}, 422, "format"),
    "unknown LoRA field": ({"lora_config": {"rank": 4, "alpha": 8}}, 422, "alpha"),
    "unknown project": ({"destination_project_id": "x"}, 404, "'x'"),
}


@pytest.mark.parametrize("case", BAD_STARTS)
def test_an_upload_that_could_not_be_used_is_not_started(api: Api, case: str) -> None:
    changes, status, words = BAD_STARTS[case]
    answer = start(api, **changes)
    assert (answer.status_code, words in answer.json["detail"]) == (status, True), answer.json
    assert list(api.services.records.list(Upload.namespace)) == []


def test_without_a_trainer_that_reported_its_shapes_it_is_too_early(api: Api) -> None:
    add_worker(api.services, "trainer")
    worker = api.services.records.get("workers", "trainer-0")
    api.services.records.put("workers", "trainer-0", {**worker, "describe": "{}"})
    api.services.bases._shapes.clear()
    answer = start(api)
    assert (answer.status_code, "try again soon" in answer.json["detail"]) == (503, True)


def test_an_upload_is_its_projects_alone(api: Api, stranger: Api) -> None:
    upload_id = uploaded(api)
    foreign = finish(stranger, upload_id)
    api.services.records.delete(Upload.namespace, upload_id)
    missing = finish(stranger, upload_id)
    assert (foreign.status_code, foreign.data) == (missing.status_code, missing.data)
    assert foreign.status_code == 404


def test_an_expired_upload_is_as_if_it_were_not_there(api: Api) -> None:
    upload_id = uploaded(api)
    api.services.records.update(Upload.namespace, upload_id, {"expires_at": "1.0"})
    assert finish(api, upload_id).status_code == 404


def test_a_url_takes_no_more_bytes_than_the_file_can_have(api: Api) -> None:
    url = start(api).json["urls"][CONFIG_FILE]
    assert put(api, url, bytes(2**20 + 1)).status_code == 413
    assert put(api, url, bytes(2**20)).status_code == 200
    [key] = staged(api)
    assert api.services.objects.size(key) == 2**20


FORGED: dict[str, Callable[[str], str]] = {
    "size": lambda url: url.replace(f"/{2**20}/", f"/{2**21}/"),
    "file": lambda url: url.replace(CONFIG_FILE, TENSORS_FILE),
    "expiry": lambda url: url.replace("expires=", "expires=9"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_url_stores_nothing(api: Api, what: str) -> None:
    url = FORGED[what](start(api).json["urls"][CONFIG_FILE])
    assert put(api, url, b"{}").status_code == 403
    assert staged(api) == []


def test_a_url_of_an_upload_is_none_of_a_download(api: Api) -> None:
    url = start(api).json["urls"][CONFIG_FILE]
    put(api, url, b"{}")
    parts = urlsplit(url.replace(f"/uploads/{2**20}/", "/objects/"))
    assert api.client.get(f"{parts.path}?{parts.query}").status_code == 403


def test_a_url_of_a_download_is_none_of_an_upload(api: Api) -> None:
    path = imported(api)
    run, kind, name = path.removeprefix("tinker://").split("/")
    urls = api.get(f"training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls").json["urls"]
    url = urls[CONFIG_FILE].replace("/objects/", f"/uploads/{2**20}/")
    assert put(api, url, b"{}").status_code == 403
    assert json.loads(stored(api, path)[CONFIG_FILE])["r"] == 4


def test_the_urls_work_until_the_expiry_and_hardly_longer(api: Api) -> None:
    started = start(api).json
    expires = datetime.fromisoformat(started["expires"])
    assert 3500 < (expires - datetime.now(UTC)).total_seconds() <= 3600
    (of_url,) = parse_qs(urlsplit(started["urls"][CONFIG_FILE]).query)["expires"]
    assert 0 <= int(of_url) - int(expires.timestamp()) < 100


def test_a_member_uploads_into_a_project_and_a_viewer_does_not(tenant: Tenant, api: Api) -> None:
    body = {"base_model": BASE, "lora_config": LORA, "destination_project_id": "{project}"}
    call = ("POST", "external_weights_upload_start")
    assert tenant.call(tenant.key("member"), call, body).status_code == 200
    assert tenant.call(tenant.key("viewer"), call, body).status_code == 404
    assert tenant.call(tenant.key("viewer"), call, {**body, "destination_project_id": None}).status_code == 403


def test_storage_is_counted_with_unfinished_uploads_at_their_largest(
    tenant: Tenant, accounts: AccountService, api: Api
) -> None:
    member = Api(api.client, api.services, tenant.key("member"))
    before = member.get("limits").json["project"]["used"]["storage_bytes"]
    first = uploaded(member)
    most = json.loads(api.services.records.get(Upload.namespace, first)["most_bytes"])
    accounts.set_limits(tenant.project, {"storage_bytes": before + most + 10})
    api.services.quotas._limits._found.clear()
    refused = start(member)
    assert (refused.status_code, "storage_bytes" in refused.json["detail"]) == (403, True)
    assert finish(member, first).status_code == 200
    size = sum(map(len, stored(api, finish(member, first).json["tinker_path"]).values()))
    assert member.get("limits").json["project"]["used"]["storage_bytes"] == before + size
    second = uploaded_later(member, accounts, tenant.project, before + size + size - 1)
    refused = finish(member, second)
    assert (refused.status_code, "storage_bytes" in refused.json["detail"]) == (403, True)
    assert len(member.get("checkpoints").json["checkpoints"]) == 2


def test_a_repeat_of_a_finish_that_broke_off_at_its_end_needs_no_room(
    tenant: Tenant, accounts: AccountService, api: Api
) -> None:
    member = Api(api.client, api.services, tenant.key("member"))
    upload_id = uploaded(member)
    first = finish(member, upload_id)
    for name, content in FILES.items():
        api.services.objects.put_new(records.uploaded(upload_id, name), content)
    api.services.records.update(Upload.namespace, upload_id, {"finished": json.dumps(False)})
    accounts.set_limits(tenant.project, {"storage_bytes": 1})
    api.services.quotas._limits._found.clear()
    again = finish(member, upload_id)
    assert (again.status_code, again.data) == (200, first.data)


def uploaded_later(api: Api, accounts: AccountService, project: str, limit: int) -> str:
    """The id of an upload that was started before the project got this limit."""
    accounts.set_limits(project, {"storage_bytes": None})
    api.services.quotas._limits._found.clear()
    upload_id = uploaded(api)
    accounts.set_limits(project, {"storage_bytes": limit})
    api.services.quotas._limits._found.clear()
    return upload_id


def test_an_import_is_in_the_audit_log_once(admin: Api) -> None:
    upload_id = uploaded(admin)
    path = finish(admin, upload_id).json["tinker_path"]
    finish(admin, upload_id)
    [entry] = [entry for entry in own(admin) if entry.event == "checkpoint_import"]
    assert entry.event_details["tinker_path"] == path


def test_an_imported_checkpoint_comes_back_into_an_emptied_state_server(api: Api, state_url: str) -> None:
    path = imported(api)
    before = api.get("checkpoints").json["checkpoints"]
    with connect(state_url) as client:
        client.flushall()
        services = api.services
        lifecycle = RedisLifecycle(client, services.settings.engine)
        restored = Rebuild(services.oplog, lifecycle, services.records, services.objects)()
    assert path in restored.checkpoints
    after = api.get("checkpoints").json["checkpoints"]
    assert [one for one in after if one["tinker_path"] == path] == before
