"""Answers of chats and completions are kept as datums, encrypted, where a project asks for it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import numpy as np
import pytest
import redis
import tinker

from app import cli
from app.domain.limits import Limits
from app.domain.records import Sampler
from app.domain.sampling import SampledSequence, SampleRequest
from app.errors import Unavailable
from app.stores.objects.captures import ROOT, CaptureFiles, Place
from tests.pages import in_mid_hour
from tests.unit.app.api.chat.openai.caller import OpenAi, whole
from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.conftest import BASE, KEY, OTHER_KEY, Api
from workers.maintenance.captures import ExpiredCaptures

DAY_S = 86_400
RUN = "0b7a1ed4-8d0d-4d52-9d2f-1f7c3c6f8a11:train:0"


@pytest.fixture
def openai(served: tuple[Api, Standin]) -> Iterator[OpenAi]:
    """A caller whose project has no captures yet."""
    openai = OpenAi(*served)
    openai.standin.says("cd", "e")
    yield openai
    objects = openai.api.services.objects
    objects.delete(objects.list(f"{ROOT}/"))


@pytest.fixture
def capture_days(openai: OpenAi, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    limits = openai.api.services.captures._limits

    def change(days: int | None) -> None:
        monkeypatch.setattr(limits, "_default", Limits(capture_days=days))
        limits._found.clear()

    change(7)
    return change


def captures(openai: OpenAi, **asked: Any) -> list[dict[str, Any]]:
    answer = openai.api.client.get("/api/v1/captures", query_string=asked, headers={"X-API-Key": openai.key})
    assert answer.status_code == 200, answer.text
    return answer.json["captures"]


def files(openai: OpenAi, secret: str = "c" * 32) -> CaptureFiles:
    services = openai.api.services
    return CaptureFiles(services.objects, secret, services.records.now)


def expire(openai: OpenAi, days_later: float) -> None:
    """Runs a round of the maintenance task, at a later time and with no secret."""
    services = openai.api.services
    later = CaptureFiles(services.objects, "", lambda: services.records.now() + days_later * DAY_S)
    ExpiredCaptures(later).sweep()


def keep(openai: OpenAi, count: int) -> None:
    """Keeps answers of a run's checkpoint."""
    project = openai.api.services.authenticator(openai.key).project
    sampler = Sampler(project, "session", BASE, 0.0, model_path=f"tinker://{RUN}/sampler_weights/a")
    request = SampleRequest(np.array([1, 2], np.int32), 1, 4, seed=0)
    sequence = SampledSequence(np.array([3], np.int32), np.array([-1.0], np.float32), stopped=True)
    for number in range(count):
        openai.api.services.captures.keep(sampler, f"request {number}", request, [sequence])


@pytest.mark.usefixtures("capture_days")
def test_an_answer_that_is_gone_since_it_was_listed_is_left_out(
    openai: OpenAi, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(openai, 2)
    kept = openai.api.services.captures._files
    gone, left = kept.places(openai.api.services.authenticator(openai.key).project, RUN)
    page = kept.page

    def removed_behind(*asked: Any) -> list[Place]:
        found = page(*asked)
        kept.remove([gone])
        return found

    monkeypatch.setattr(kept, "page", removed_behind)
    assert [shown["id"] for shown in captures(openai)] == [left.name]


@pytest.mark.usefixtures("capture_days")
def test_kept_answers_are_datums_that_a_run_can_train_on(openai: OpenAi) -> None:
    openai.completion(n=2)
    whole(openai.post("chat/completions", messages=[{"role": "user", "content": "hi"}], stream=True))
    of_completion, of_chat = captures(openai)
    assert (of_completion["model"], len(of_completion["datums"]), len(of_chat["datums"])) == (BASE, 2, 1)
    model = openai.api.model()
    for seen, kept in zip(openai.standin.seen, (of_completion, of_chat), strict=True):
        for datum, text in zip(kept["datums"], ("cd", "e"), strict=False):
            sequence, prompt = openai.standin.sequence(text), seen.prompt.tolist()
            whole_text, before = [*prompt, *sequence.tokens.tolist()], len(prompt) - 1
            inputs = datum["loss_fn_inputs"]
            assert datum["model_input"]["chunks"][0]["tokens"] == whole_text[:-1]
            assert inputs["target_tokens"]["data"] == whole_text[1:]
            assert inputs["weights"]["data"] == [0] * before + [1] * len(sequence.tokens)
            assert inputs["logprobs"]["data"] == [0] * before + sequence.logprobs.tolist()
    data = [datum for kept in (of_completion, of_chat) for datum in kept["datums"]]
    tensors = [tinker.TensorData(**tensor) for datum in data for tensor in datum["loss_fn_inputs"].values()]
    assert [len(tensor.tolist()) for tensor in tensors] == [4] * 3 + [3] * 3 + [len(prompt) + 2] * 3
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}
    answer = openai.api.post("forward_backward", body)
    assert answer.status_code == 200, answer.text


def test_nothing_is_kept_unless_the_project_asks(openai: OpenAi, capture_days: Callable[[int | None], None]) -> None:
    capture_days(None)
    openai.completion()
    capture_days(7)
    assert captures(openai) == []


def test_a_project_has_days_of_its_own(openai: OpenAi, capsys: pytest.CaptureFixture[str]) -> None:
    settings = openai.api.services.settings

    def admin(*arguments: str) -> str:
        servers = ("--data-dir", str(settings.data_dir), "--redis", settings.redis.url)
        assert cli.main(["admin", *arguments, *servers]) == 0
        return capsys.readouterr().out.strip()

    keys = []
    for days in ("3", "none"):
        organisation = admin("org", "create", "Tinkers")
        project = admin("project", "create", "kettles", "--org", organisation)
        user = admin("user", "create", "jo@example.org", "--org", organisation)
        admin("user", "role", user, project, "member")
        assert admin("limits", "set", project, "--capture-days", days) == f"capture_days={days}"
        keys.append(admin("key", "create", "--user", user))
    keeping, other = (replace(openai, key=key) for key in keys)
    for caller in (keeping, other):
        caller.completion()
    assert (len(captures(keeping)), len(captures(other))) == (1, 0)
    expire(keeping, 2.9)
    assert len(captures(keeping)) == 1
    expire(keeping, 4.1)
    assert captures(keeping) == []


@pytest.mark.usefixtures("capture_days")
def test_nothing_is_kept_that_was_not_sampled(openai: OpenAi) -> None:
    openai.completion(max_tokens=0, echo=True, logprobs=1)
    assert captures(openai) == []


@pytest.mark.usefixtures("capture_days")
def test_a_kept_answer_cannot_be_read_without_the_secret(openai: OpenAi) -> None:
    openai.completion(prompt="a prompt")
    (key,) = openai.api.services.objects.list(f"{ROOT}/")
    stored = openai.api.services.objects.read(key)
    tokens = openai.standin.tokenizer.encode("a prompt").tolist()
    for clear in (b"prompt", b"tokens", str(tokens).encode()):
        assert clear not in stored
    project = openai.api.services.authenticator(openai.key).project
    (place,) = files(openai).places(project)
    assert files(openai, "d" * 32).read(place) is None
    kept = files(openai).read(place)
    assert kept is not None
    assert kept.prompt == tokens


@pytest.mark.usefixtures("capture_days")
def test_a_server_without_the_secret_keeps_nothing_and_says_so(openai: OpenAi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai.api.services.captures, "_files", files(openai, ""))
    openai.completion()
    assert openai.api.services.objects.list(f"{ROOT}/") == []
    answer = openai.api.client.get("/api/v1/captures", headers={"X-API-Key": openai.key})
    assert (answer.status_code, "capture_secret" in answer.json["detail"]) == (404, True)


@pytest.mark.usefixtures("capture_days")
def test_other_projects_neither_see_nor_delete_kept_answers(openai: OpenAi) -> None:
    openai.completion()
    stranger = OpenAi(openai.api, openai.standin, OTHER_KEY)
    assert captures(stranger) == []
    for caller, deleted in ((stranger, 0), (openai, 1)):
        answer = openai.api.client.delete("/api/v1/captures", headers={"X-API-Key": caller.key})
        assert answer.json == {"deleted": deleted}
    assert captures(openai) == []


@pytest.mark.usefixtures("capture_days")
def test_a_deletion_takes_only_the_answers_of_the_run_that_it_names(openai: OpenAi) -> None:
    openai.completion()
    keep(openai, 2)
    for run, deleted, left in ((RUN, 2, [BASE]), ("", 1, [])):
        answer = openai.api.client.delete("/api/v1/captures", query_string={"run_id": run}, headers={"X-API-Key": KEY})
        assert answer.json == {"deleted": deleted}
        assert [kept["model"] for kept in captures(openai)] == left


@pytest.mark.usefixtures("capture_days")
def test_a_deletion_has_one_entry_in_the_audit_log_and_one_of_nothing_has_none(
    openai: OpenAi, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_mid_hour()
    services = openai.api.services

    def delete() -> int:
        answer = openai.api.client.delete("/api/v1/captures", headers={"X-API-Key": openai.key})
        return answer.json["deleted"] if answer.status_code == 200 else answer.status_code

    openai.completion()
    with monkeypatch.context() as away:
        away.setattr(services.objects, "delete", mock.Mock(side_effect=Unavailable("away")))
        assert [delete(), delete()] == [503, 503]
    assert [delete(), delete()] == [1, 0]
    openai.completion()
    assert [delete(), delete()] == [1, 0]
    project = services.authenticator(openai.key).project
    today = datetime.fromtimestamp(services.records.now(), UTC).date()
    events = [entry["event"] for entry in services.audit.of([project], "projects", today)]
    assert events == ["capture_delete", "capture_delete"]


@pytest.mark.usefixtures("capture_days")
def test_answers_of_a_run_are_listed_by_it_a_page_at_a_time(openai: OpenAi) -> None:
    openai.completion()
    keep(openai, 3)
    first, second, third = captures(openai, run_id=RUN)
    assert [kept["request_id"] for kept in (first, second, third)] == ["request 0", "request 1", "request 2"]
    assert captures(openai, run_id=RUN, after=first["id"], limit=1) == [second]
    assert captures(openai, run_id=RUN, after=second["id"]) == [third]
    assert [kept["model"] for kept in captures(openai, run_id="")] == [BASE]
    assert len(captures(openai)) == 4


@pytest.mark.usefixtures("capture_days")
@pytest.mark.parametrize(("run", "listings"), [(RUN, 1), ("", 1), (None, 2)], ids=["a run", "base models", "all"])
def test_a_page_lists_no_more_keys_of_a_run_than_it_has_and_one(
    openai: OpenAi, monkeypatch: pytest.MonkeyPatch, run: str | None, listings: int
) -> None:
    keep(openai, 6)
    for _ in range(6):
        openai.completion()
    objects, listed = openai.api.services.objects, list[int]()
    page = objects.page

    def note(*asked: Any) -> Sequence[str]:
        found = page(*asked)
        listed.append(len(found))
        return found

    monkeypatch.setattr(objects, "page", note)
    monkeypatch.setattr(openai.api.services.captures._files, "_places", mock.Mock(side_effect=AssertionError))
    asked: dict[str, Any] = {"limit": 2, "run_id": run} if run is not None else {"limit": 2}
    headers, seen, answer = {"X-API-Key": openai.key}, [], {"has_more": True, "last_id": ""}
    while answer["has_more"]:
        listed.clear()
        query = {**asked, "after": answer["last_id"]}
        answer = openai.api.client.get("/api/v1/captures", query_string=query, headers=headers).json
        seen += [kept["id"] for kept in answer["captures"]]
        assert len(listed) == listings
        assert max(listed) <= 2 + 1
    assert seen == sorted(seen)
    assert len(set(seen)) == 6 * listings


@pytest.mark.usefixtures("capture_days")
def test_pages_of_many_runs_hold_each_answer_once(openai: OpenAi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folders are not listed one by one."""
    monkeypatch.setattr("app.stores.objects.captures._MOST_FOLDERS", 1)
    monkeypatch.setattr(openai.api.services.objects, "page", mock.Mock(side_effect=AssertionError))
    keep(openai, 2)
    openai.completion()
    first, second = captures(openai, limit=2)
    (third,) = captures(openai, after=second["id"])
    assert len({first["id"], second["id"], third["id"]}) == 3


@pytest.mark.usefixtures("capture_days")
def test_foreign_files_hide_no_kept_answer(openai: OpenAi) -> None:
    openai.completion()
    project = openai.api.services.authenticator(openai.key).project
    for length in range(1, 6):
        openai.api.services.objects.put_new(f"{ROOT}/{project}/-/{'0' * length}", b"mine")  # they sort before it
    openai.completion()
    assert len(captures(openai, run_id="", limit=2)) == 2
    assert len(captures(openai, limit=1)) == 1


@pytest.mark.parametrize("asked", [{"run_id": "a run"}, {"run_id": "-"}, {"after": "é"}, {"after": "../x"}])
def test_what_names_no_run_or_page_is_refused(openai: OpenAi, asked: dict[str, str]) -> None:
    answer = openai.api.client.get("/api/v1/captures", query_string=asked, headers={"X-API-Key": openai.key})
    assert (answer.status_code, next(iter(asked)) in answer.text) == (400, True)


@pytest.mark.usefixtures("capture_days")
def test_a_page_and_an_answer_have_a_bound_of_tokens(openai: OpenAi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.openai.captures._MOST_TOKENS", 12)
    for _ in range(3):  # 5 tokens each
        openai.completion()
    openai.completion(n=4)
    headers = {"X-API-Key": openai.key}
    page = openai.api.client.get("/api/v1/captures", headers=headers).json
    assert (len(page["captures"]), page["has_more"]) == (2, True)
    rest = openai.api.client.get("/api/v1/captures", query_string={"after": page["last_id"]}, headers=headers).json
    assert (len(rest["captures"]), rest["has_more"]) == (1, False)


@pytest.mark.usefixtures("capture_days")
@pytest.mark.parametrize("away", ["app.stores.objects.folder.FolderStore.put_new", "the state server"])
def test_no_answer_fails_because_it_cannot_be_kept(openai: OpenAi, monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    def fail(*_: object) -> float:
        raise redis.ConnectionError if away == "the state server" else Unavailable("the object store is away")

    with monkeypatch.context() as patch:
        if away == "the state server":
            records = openai.api.services.captures._records
            patch.setattr(openai.api.services.captures, "_records", mock.Mock(wraps=records, now=fail))
        else:
            patch.setattr(away, fail)
        assert openai.completion()["choices"][0]["text"] == "cd"
    assert captures(openai) == []


def test_a_kept_answer_expires_after_the_days_that_held_when_it_was_kept(
    openai: OpenAi, capture_days: Callable[[int | None], None]
) -> None:
    openai.completion()
    capture_days(1)
    expire(openai, days_later=6.9)
    assert len(captures(openai)) == 1
    expire(openai, days_later=7)
    assert captures(openai) == []


@pytest.mark.usefixtures("capture_days")
def test_a_foreign_file_is_neither_listed_nor_deleted(openai: OpenAi) -> None:
    project = openai.api.services.authenticator(openai.key).project
    openai.api.services.objects.put_new(f"{ROOT}/{project}/notes", b"mine")
    expire(openai, days_later=1000)
    assert captures(openai) == []
    assert openai.api.services.objects.list(f"{ROOT}/") == [f"{ROOT}/{project}/notes"]
