from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.domain.records import Worker
from app.errors import Unavailable
from app.stores.redis.backlog import RedisBacklog
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from tests.unit.app.api.test_sampling import body as sample_body
from tests.unit.app.conftest import BASE, Api, batch


@pytest.fixture(autouse=True)
def fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads the queues anew, however fast the machine."""
    monkeypatch.setattr("app.services.queue._METRICS_AGE_S", -1.0)


def samples(api: Api) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(api.client.get("/metrics").text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_admissions_and_waiting_work_are_counted(api: Api) -> None:
    counter = ("tinsmith_admissions_total", frozenset({("kind", "forward_backward")}))
    depth = ("tinsmith_queue_depth", frozenset({("queue", f"train.{BASE}")}))
    model = api.model()
    before = samples(api)
    assert depth not in before
    for _ in range(2):
        api.forward_backward(batch(model, 1))
    after = samples(api)
    assert after[counter] == before.get(counter, 0) + 1, "a repeat is no new admission"
    assert after[depth] == 1
    assert after["tinsmith_held_polls", frozenset()] == 0
    api.commit(model, 1)
    assert depth not in samples(api)


def by_project(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.services.queue, "_by_project", True)


def test_where_asked_waiting_work_is_counted_by_project(
    api: Api, stranger: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_project(api, monkeypatch)
    for one, count in ((api, 2), (stranger, 1)):
        for _ in range(count):
            one.forward_backward(batch(one.model(), 1))
    stranger.post("asample", sample_body(stranger.sampler()))
    found = {labels: value for (name, labels), value in samples(api).items() if name == "tinsmith_queue_depth"}
    mine, theirs = (api.services.authenticator(one.key).project for one in (api, stranger))
    assert found == {
        frozenset({("queue", f"train.{BASE}"), ("project", mine)}): 2,
        frozenset({("queue", f"train.{BASE}"), ("project", theirs)}): 1,
        frozenset({("queue", f"sample.{BASE}"), ("project", theirs)}): 1,
    }


def test_the_age_of_a_queue_is_that_of_its_oldest_entry(api: Api) -> None:
    queue = ("tinsmith_queue_age_seconds", frozenset({("queue", f"train.{BASE}")}))
    models = [api.model() for _ in range(3)]
    for model in models:
        api.forward_backward(batch(model, 1))
    assert 0 <= samples(api)[queue] < 600
    with connect(api.services.settings.redis.url) as client:
        client.zincrby("tinsmith:pending", -1_000_000, models[1])
    assert 1000 <= samples(api)[queue] < 1600


def backlog(api: Api, role: str) -> float:
    return samples(api)["tinsmith_backlog", frozenset({("base_model", BASE), ("role", role)})]


def age(api: Api, role: str) -> float:
    return samples(api)["tinsmith_backlog_age_seconds", frozenset({("base_model", BASE), ("role", role)})]


def without_workers(api: Api) -> None:
    """As if the API had just started, while no worker runs."""
    for role in ("trainer", "sampler"):
        api.services.records.delete(Worker.namespace, f"{role}-0")
    api.services.bases._known.clear()


def test_an_autoscaler_reads_what_waits_for_each_role_also_while_no_worker_runs(api: Api) -> None:
    model, sampler = api.model(), api.sampler()
    for role in ("trainer", "sampler"):
        api.services.records.delete(Worker.namespace, f"{role}-0")
    assert (backlog(api, "trainer"), backlog(api, "sampler")) == (0, 0), "a missing value would be a fault"
    assert (age(api, "trainer"), age(api, "sampler")) == (0, 0)
    api.forward_backward(batch(model, 1))
    assert (backlog(api, "trainer"), backlog(api, "sampler")) == (1, 0)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    assert api.post("asample", {**asked, "num_samples": 1}).status_code == 200
    assert (backlog(api, "trainer"), backlog(api, "sampler")) == (1, 1)
    with connect(api.services.settings.redis.url) as client:
        client.zincrby("tinsmith:pending", -100_000, model)
    assert 100 <= age(api, "trainer") < 700
    assert 0 <= age(api, "sampler") < 600
    api.commit(model, 1)
    assert (backlog(api, "trainer"), age(api, "trainer")) == (0, 0)


def test_a_call_that_is_refused_as_no_worker_was_ever_up_makes_the_autoscaler_start_one(api: Api) -> None:
    without_workers(api)
    asked = {"session_id": api.session(), "model_seq_id": 0, "base_model": BASE}
    assert api.post("create_model", asked).status_code == 503
    assert (backlog(api, "trainer"), backlog(api, "sampler")) == (1, 0)


def test_within_a_moment_the_metrics_read_what_waits_only_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics needs no key."""
    reads: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        read = getattr(owner, name)

        def counted(*args: Any, **more: Any) -> Any:
            reads[name] += 1
            return read(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    def backlog_and_depth() -> tuple[float, float]:
        found, queue = samples(api), frozenset({("queue", f"train.{BASE}"), ("project", project)})
        role = frozenset({("base_model", BASE), ("role", "trainer")})
        return found["tinsmith_backlog", role], found.get(("tinsmith_queue_depth", queue), 0)

    project = api.services.authenticator(api.key).project
    by_project(api, monkeypatch)
    once = {"by_queue": 1, "pending": 1, "owners": 1}
    for owner, name in ((RedisBacklog, "by_queue"), (RedisOpLog, "pending"), (RedisBacklog, "owners")):
        count(owner, name)
    assert backlog_and_depth() == (0, 0)
    assert reads == once
    monkeypatch.setattr("app.services.queue._METRICS_AGE_S", 3600.0)
    api.forward_backward(batch(api.model(), 1))
    assert backlog_and_depth() == (0, 0)
    assert reads == once
    monkeypatch.setattr("app.services.queue._METRICS_AGE_S", -1.0)
    assert backlog_and_depth() == (1, 1)
    assert reads == dict.fromkeys(once, 2)


def test_while_the_state_server_is_away_no_older_metrics_are_shown(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler would act on them."""
    assert api.client.get("/metrics").status_code == 200

    def away(*_: object, **__: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(RedisOpLog, "pending", away)
        assert api.client.get("/metrics").status_code == 503
        patch.setattr("app.services.queue._METRICS_AGE_S", 3600.0)
        assert api.client.get("/metrics").status_code == 503
    assert api.client.get("/metrics").status_code == 200


def test_the_metrics_have_base_models_and_roles_for_labels_and_no_more(api: Api) -> None:
    api.model()
    labels = {frozenset(labels) for name, labels in samples(api) if name.startswith("tinsmith_backlog")}
    assert {frozenset(dict(one)) for one in labels} == {frozenset({"base_model", "role"})}
    assert {dict(one)["base_model"] for one in labels} == {BASE}


def test_request_times_are_kept_by_route_not_by_url(api: Api) -> None:
    sampler = api.sampler()
    api.get(f"samplers/{sampler}")
    routes = {dict(labels).get("route") for name, labels in samples(api) if name == "tinsmith_request_seconds_count"}
    assert "/api/v1/samplers/<sampler_id>" in routes
    assert not any(sampler in str(route) for route in routes)


def test_errors_are_counted_by_status_and_kind_not_by_message(api: Api) -> None:
    def count(status: str, error: str) -> float:
        return samples(api).get(("tinsmith_errors_total", frozenset({("status", status), ("error", error)})), 0)

    before = count("404", "NotFound"), count("401", "Unauthorized"), count("422", "Unprocessable Entity")
    for _ in range(2):
        api.get("samplers/none:sample:0")
    api.client.get("/api/v1/samplers/none")
    api.post("create_session", {"tags": 3})
    after = count("404", "NotFound"), count("401", "Unauthorized"), count("422", "Unprocessable Entity")
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 1, 1]


def test_the_time_of_admissions_and_polls_is_kept(api: Api) -> None:
    trained, sampled = (
        ("tinsmith_admit_seconds_count", frozenset({("kind", kind)})) for kind in ("forward_backward", "sample")
    )
    polled = ("tinsmith_poll_seconds_count", frozenset())
    model, sampler, before = api.model(), api.sampler(), samples(api)
    for _ in range(2):
        answer = api.forward_backward(batch(model, 1))
        assert api.post("asample", sample_body(sampler)).status_code == 200
    api.commit(model, 1)
    api.post("retrieve_future", {"request_id": answer.json["request_id"]})
    after = samples(api)
    counted = [after[metric] - before.get(metric, 0) for metric in (trained, sampled, polled)]
    assert counted == [1, 1, 1], "a repeat is no admission"
