from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.app.conftest import BASE, Api, batch


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


def test_request_times_are_kept_by_route_not_by_url(api: Api) -> None:
    sampler = api.sampler()
    api.get(f"samplers/{sampler}")
    routes = {dict(labels).get("route") for name, labels in samples(api) if name == "tinsmith_request_seconds_count"}
    assert "/api/v1/samplers/<sampler_id>" in routes
    assert not any(sampler in str(route) for route in routes)
