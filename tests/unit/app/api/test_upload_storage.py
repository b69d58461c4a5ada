"""Uploads at their limits: the storage of projects and keys, a full disk, and one content for each import."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import TestResponse

from app.domain import records
from app.domain.adapters import CONFIG_FILE, TENSORS_FILE
from app.domain.records import Checkpoint, Upload
from app.errors import Unavailable
from app.services.imports.importer import path_of
from app.services.recovery.rebuild import Rebuild
from app.services.tenants.accounts import AccountService
from app.services.tenants.limits import QuotaService
from app.stores.disk import Disk
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from tests.peft_adapters import peft_files
from tests.unit.app.api.test_uploads import (
    ALL,
    FILES,
    LORA,
    finish,
    no_files_of_other_tests,
    put,
    staged,
    start,
    stored,
    uploaded,
)
from tests.unit.app.conftest import BASE, Api
from tests.unit.app.tenant import Tenant

__all__ = ["no_files_of_other_tests"]  # the fixture
OTHERS = peft_files(ALL, 4, lora_alpha=16)


@pytest.fixture
def member(tenant: Tenant, api: Api) -> Api:
    return Api(api.client, api.services, tenant.key("member"))


@pytest.fixture
def limit(tenant: Tenant, accounts: AccountService, member: Api) -> Callable[[int | None], None]:
    """Leaves the project room for so many bytes beside those that it has."""

    def leave(room: int | None) -> None:
        limit = None if room is None else used(member) + room
        accounts.set_limits(tenant.project, {"storage_bytes": limit})
        member.services.quotas._limits._found.clear()

    return leave


def begin(api: Api, key: str) -> TestResponse:
    """Starts an upload under an idempotency key."""
    body, headers = {"base_model": BASE, "lora_config": LORA}, {"X-API-Key": api.key, "X-Idempotency-Key": key}
    return api.client.post("/api/v1/external_weights_upload_start", json=body, headers=headers)


def used(api: Api, payer: str = "project") -> int:
    return int(api.get("limits").json[payer]["used"]["storage_bytes"])


def largest(api: Api) -> int:
    """The bytes that an upload counts with; it is gone afterwards."""
    before = used(api)
    start(api)
    most = used(api) - before
    api.services.oplog._redis.delete(*api.services.oplog._redis.keys("tinsmith:reserv*"))
    return most


def interleaved(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, other: Callable[[], TestResponse]) -> list[Any]:
    """Makes another call while the next call is in the method `name`; its answer comes into the list."""
    works, answers = getattr(cls, name), list[TestResponse]()

    def method(self: Any, *asked: Any) -> Any:
        monkeypatch.setattr(cls, name, works)
        answers.append(other())
        return works(self, *asked)

    monkeypatch.setattr(cls, name, method)
    return answers


def test_starts_at_the_same_time_never_pass_the_limit_together(
    member: Api, limit: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(largest(member) + 10)
    answers = interleaved(monkeypatch, RedisQuotas, "reserve", lambda: start(member))
    answers.append(start(member))
    assert sorted(answer.status_code for answer in answers) == [200, 403]


def test_a_repeat_of_a_start_returns_its_upload_and_reserves_no_more(
    member: Api, limit: Callable[[int | None], None]
) -> None:
    limit(largest(member))
    first, reserved = begin(member, "one"), used(member)
    repeat = begin(member, "one")
    assert (repeat.status_code, repeat.json["upload_id"]) == (200, first.json["upload_id"])
    assert used(member) == reserved
    assert begin(member, "two").status_code == 403
    for name, url in repeat.json["urls"].items():
        assert put(member, url, FILES[name]).status_code == 200
    assert finish(member, first.json["upload_id"]).status_code == 200
    stored = used(member)
    assert (begin(member, "one").status_code, used(member)) == (200, stored)


def test_a_repeat_at_the_same_time_is_not_charged_and_keeps_the_reservation(
    member: Api, tenant: Tenant, accounts: AccountService, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = largest(member)
    before = used(member)
    accounts.set_limits(tenant.project, {"requests_per_s": 0.0001})
    member.services.quotas._limits._found.clear()
    answers = interleaved(monkeypatch, RedisQuotas, "reserve", lambda: begin(member, "one"))
    answers.append(begin(member, "one"))
    assert [answer.status_code for answer in answers] == [200, 200], [answer.json for answer in answers]
    assert answers[0].json["upload_id"] == answers[1].json["upload_id"]
    assert used(member) == before + most
    assert begin(member, "two").status_code == 429, "the first one was charged"


def test_of_many_starts_at_once_as_many_pass_as_there_is_room_for(
    member: Api, limit: Callable[[int | None], None]
) -> None:
    limit(3 * largest(member))
    app = member.client.application
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda _: start(replace(member, client=app.test_client())).status_code, range(24))
        assert sorted(found) == [200] * 3 + [403] * 21


def test_finishes_at_the_same_time_never_pass_the_limit_together(
    member: Api, limit: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = uploaded(member), uploaded(member)
    member.services.oplog._redis.delete(*member.services.oplog._redis.keys("tinsmith:reserv*"))
    limit(2 * len(FILES[TENSORS_FILE]))
    before = used(member)
    answers = interleaved(monkeypatch, type(member.services.objects), "put_new", lambda: finish(member, second))
    answers.append(finish(member, first))
    assert sorted(answer.status_code for answer in answers) == [200, 403]
    made = [one for one in member.get("checkpoints").json["checkpoints"] if "external_weights" in one["tinker_path"]]
    assert used(member) == before + sum(one["size_bytes"] for one in made)


def test_a_finish_that_another_one_overtakes_needs_no_room_of_its_own(
    member: Api, limit: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(largest(member))
    upload_id = uploaded(member)
    reserve = QuotaService.reserve

    def late(self: QuotaService, *asked: Any) -> None:
        monkeypatch.setattr(QuotaService, "reserve", reserve)
        answers.append(finish(member, upload_id))
        limit(0)
        reserve(self, *asked)

    monkeypatch.setattr(QuotaService, "reserve", late)
    answers = list[TestResponse]()
    answers.insert(0, finish(member, upload_id))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].data == answers[1].data


def test_a_key_pays_for_its_own_uploads_alone(tenant: Tenant, accounts: AccountService, member: Api) -> None:
    other = replace(member, key=tenant.key("member"))
    most = largest(member)
    accounts.set_limits(member.get("limits").json["key"]["id"], {"storage_bytes": used(member, "key") + most})
    member.services.quotas._limits._found.clear()
    assert [start(other).status_code for _ in range(2)] == [200, 200]
    assert start(member).status_code == 200
    assert start(member).status_code == 403
    assert start(other).status_code == 200


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_of_the_server_is_a_503_and_the_next_finish_succeeds(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    upload_id = uploaded(api)
    for full in (
        lambda patch: patch.setattr(tempfile, "tempdir", str(tmp_path / "none")),
        lambda patch: patch.setattr(type(api.services.objects), "get", no_space),
        lambda patch: patch.setattr(Path, "write_bytes", no_space),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path))
            full(patch)
            answer = finish(api, upload_id)
        assert (answer.status_code, "Retry-After" in answer.headers) == (503, True), answer.json
        assert "on the server's disk" in answer.json["detail"]
        assert list(tmp_path.iterdir()) == []
        assert api.services.objects.list(f"models/{upload_id}") == []
    assert finish(api, upload_id).status_code == 200


def test_a_full_disk_of_the_store_is_a_503_and_the_file_may_be_sent_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start(api).json
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "copy", no_space)
        answer = put(api, started["urls"][CONFIG_FILE], FILES[CONFIG_FILE])
    assert (answer.status_code, "No space left" in answer.json["detail"]) == (503, True)
    assert staged(api) == []
    for name, url in started["urls"].items():
        assert put(api, url, FILES[name]).status_code == 200
    assert finish(api, started["upload_id"]).status_code == 200


@pytest.mark.parametrize("name", FILES)
def test_a_larger_file_that_an_s3_url_took_is_refused(api: Api, name: str) -> None:
    upload_id = uploaded(api, {})
    most = json.loads(api.services.records.get(Upload.namespace, upload_id)["most_bytes"])
    for each, content in {**FILES, name: bytes(most + 1)}.items():
        api.services.objects.put_new(records.uploaded(upload_id, each), content)
    answer = finish(api, upload_id)
    assert (answer.status_code, f"{name} is too large" in answer.json["detail"]) == (400, True)


def test_the_room_of_a_large_checkpoint_stays_reserved_while_a_slow_store_takes_its_files(api: Api) -> None:
    size, slow = 600 * 10**9, 20 * 10**6  # bytes, and bytes a second
    services, path = api.services, path_of("slow")
    project = services.authenticator(api.key).project
    services.quotas.reserve(None, project, path, size)
    lapses = services.oplog._redis.zscore("tinsmith:reservations_lapse", str(path)) / 1000
    assert lapses - services.records.now() > size / slow


def test_the_session_of_an_import_has_ended_though_a_finish_broke_off_before_that(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise Unavailable("away")

    upload_id = uploaded(api)
    with monkeypatch.context() as patch:
        patch.setattr(RedisLifecycle, "finish", away)
        assert finish(api, upload_id).status_code == 503
    assert finish(api, upload_id).status_code == 200
    session = api.services.records.get("sessions", upload_id)
    assert session is not None and session["status"] == '"success"'


def test_only_some_finishes_run_at_once(api: Api) -> None:
    upload_id, running = uploaded(api), api.services.uploads.finishes
    taken = 0
    while running.acquire(blocking=False):
        taken += 1
        assert taken < 10, "each may hold a copy of an adapter's files on the local disk"
    answer = finish(api, upload_id)
    running.release(taken)
    assert (answer.status_code, "try again soon" in answer.json["detail"]) == (503, True)
    for _ in range(taken + 1):
        assert finish(api, upload_id).status_code == 200


def test_an_import_has_one_content_and_a_rebuild_ends_with_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, state_url: str
) -> None:
    upload_id = uploaded(api)
    path, store = str(path_of(upload_id)), type(api.services.objects)

    def send(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            key = records.uploaded(upload_id, name)
            api.services.objects.delete([key])
            api.services.objects.put_new(key, content)

    with monkeypatch.context() as patch:
        works = store.put_new

        def breaks_off(self: Any, key: str, source: Any) -> bool:
            works(self, key, source)
            if key.endswith("manifest.json"):
                raise Unavailable("the object store is away")
            return True

        patch.setattr(store, "put_new", breaks_off)
        assert finish(api, upload_id).status_code == 503
    send(OTHERS)
    refused = finish(api, upload_id)
    assert (refused.status_code, "start a new upload" in refused.json["detail"]) == (400, True)
    send(FILES)
    assert finish(api, upload_id).json == {"tinker_path": path}
    assert stored(api, path)[TENSORS_FILE] == FILES[TENSORS_FILE]
    before = api.services.records.get(Checkpoint.namespace, path)
    services = api.services
    with connect(state_url) as client:
        client.flushall()
        lifecycle = RedisLifecycle(client, services.settings.engine)
        Rebuild(services.oplog, lifecycle, services.records, services.objects)()
    assert {**before, "key": '""'} == services.records.get(Checkpoint.namespace, path)
