"""Cost of usage by event and by run, and budgets: a project with a spent one trains and samples no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis
from flask import Flask
from tinker.types import CurrentCheckpointStorageUsageResponse

from app import create_app
from app.domain.checkpoints import CheckpointPrefix
from app.domain.prices import Prices
from app.domain.results import Result, Usage
from app.settings import Settings
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.telemetry import REGISTRY
from tests.unit.app.api.test_billing import events, stored, this_hour, train, window
from tests.unit.app.api.test_limits import Limit, limit, save, step
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api, batch
from tests.unit.app.tenant import SAMPLED, Tenant

__all__ = ["limit"]
DEARER = "org/dearer"
"""A base model whose checkpoints cost more than others."""
A_TOKEN = 10**6
"""The price of a million tokens at one dollar a token."""


@pytest.fixture(scope="module")
def app(settings: Settings) -> Flask:
    """An API with prices: a trained token costs a dollar, a sampled one of this base model two."""
    base = settings.base_models[0].model_copy(update={"prices": Prices(sampling=2 * A_TOKEN)})
    dearer = base.model_copy(update={"name": DEARER, "prices": Prices(gb_month=720.0)})
    prices = Prices(training=A_TOKEN, sampling=9 * A_TOKEN, gb_month=360.0)
    return create_app(settings.model_copy(update={"prices": prices, "base_models": (base, dearer)}))


def sample(api: Api, sampler: str, seq: int = 0) -> Any:
    return api.post("asample", {"sampling_session_id": sampler, "seq_id": seq, **SAMPLED})


def spend(api: Api, usage: Usage) -> str:
    """Returns a model whose batch at seq 1 cost so much."""
    model = api.model()
    train(api, model, usage)
    return model


def test_a_spent_budget_refuses_what_costs_and_says_what_to_do(api: Api, limit: Limit) -> None:
    sampler, model = api.sampler(), spend(api, {"training": 6, "sampling_sample": 2})
    limit(monthly_budget=10)
    project = api.get("limits").json["project"]
    assert (project["limits"]["monthly_budget"], project["used"]["monthly_budget"]) == (10, 10)
    forward = batch(model, 3)
    forward.forward_only = True
    before = refusals()
    for answer in (api.forward_backward(batch(model, 2)), api.forward_backward(forward), sample(api, sampler)):
        assert (answer.status_code, answer.json["error"]) == (403, "BudgetSpent"), answer.text
        assert "Retry-After" not in answer.headers
        said = f"project {project['id']} has spent 10 US dollars this month, and its monthly_budget is 10: it can train"
        assert answer.json["detail"].startswith(said)
        assert "raises the budget; saving and reading still work" in answer.json["detail"]
    assert refusals() == before + 3


def test_a_batch_whose_first_copy_another_process_admits_meanwhile_is_the_same_call(
    api: Api, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of 403 would let the client send a call again that runs."""
    model, refuse = api.model(), RedisOpLog.refuse
    first = []

    def refuse_behind_it(self: RedisOpLog, *asked: Any) -> bool:
        limit()  # of a process that has not read the new limits yet
        first.append(api.forward_backward(batch(model, 1)).json)
        limit(monthly_budget=0)
        return refuse(self, *asked)

    monkeypatch.setattr(RedisOpLog, "refuse", refuse_behind_it)
    limit(monthly_budget=0)
    answer = api.forward_backward(batch(model, 1))
    assert (answer.status_code, [answer.json]) == (200, first)
    entry = api.services.oplog.entry(model, 1)
    assert (entry.kind, entry.doomed) == ("forward_backward", "")
    monkeypatch.setattr(RedisOpLog, "refuse", refuse)
    other = api.forward_backward(batch(model, 1, tokens=[1, 2, 4]))
    assert (other.status_code, "used before" in other.json["detail"]) == (400, True)


def refusals() -> float:
    """The counted answers to calls of projects with a spent budget."""
    return REGISTRY.get_sample_value("tinsmith_errors_total", {"status": "403", "error": "BudgetSpent"}) or 0.0


def test_below_the_budget_nothing_is_refused_and_one_call_may_pass_it(api: Api, limit: Limit) -> None:
    limit(monthly_budget=6.5)
    model = spend(api, {"training": 6})
    train(api, model, {"training": 1000}, seq=2)
    assert api.forward_backward(batch(model, 3)).status_code == 403


def test_a_higher_budget_resumes_and_a_seq_that_was_refused_is_consumed(api: Api, limit: Limit) -> None:
    model = spend(api, {"training": 6})
    limit(monthly_budget=6)
    assert api.forward_backward(batch(model, 2)).status_code == 403
    limit(monthly_budget=7)
    assert (api.forward_backward(batch(model, 2)).status_code, api.ops(model)) == (400, [0, 1, 2])
    assert api.forward_backward(batch(model, 3)).status_code == 200
    assert api.services.oplog.waiting(model, 2) == ("lost_batch", "forward_backward")


def test_what_was_accepted_before_is_repeated_and_stepped_saved_and_read(api: Api, limit: Limit) -> None:
    model, sampler = spend(api, {"training": 6}), api.sampler()
    accepted = api.forward_backward(batch(model, 2)), sample(api, sampler)
    limit(monthly_budget=1)
    again = api.forward_backward(batch(model, 2)), sample(api, sampler)
    assert [answer.json for answer in again] == [answer.json for answer in accepted]
    assert step(api, model, 3).status_code == 200, "it uses gradients that were paid for"
    assert save(api, model, 4).status_code == 200
    api.commit(model, 2)
    request = {"request_id": accepted[0].json["request_id"]}
    assert api.post("retrieve_future", request).status_code == 200
    path = save_checkpoint(api, model).removeprefix("tinker://")
    run, kind, name = path.split("/")
    assert api.get(f"training_runs/{run}/checkpoints").status_code == 200
    assert api.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive").status_code in (200, 302)
    assert api.services.oplog.waiting(model, 3) == ("optim_step", "save_weights")


def test_a_chunk_that_later_chunks_of_its_batch_wait_for_is_admitted(api: Api, limit: Limit) -> None:
    model, other = spend(api, {"training": 6}), api.model()
    assert api.forward_backward(batch(model, 3)).status_code == 200
    limit(monthly_budget=6)
    assert [api.forward_backward(batch(each, seq)).status_code for each, seq in ((model, 2), (other, 1))] == [200, 403]


def test_a_budget_is_one_projects_and_a_keys_is_ignored(
    tenant: Tenant, api: Api, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend(api, {"training": 6})
    limit(monthly_budget=6)
    member = replace(api, key=tenant.key("member"))
    with monkeypatch.context() as earlier:  # which let a key have one
        earlier.setattr("app.services.tenants.accounts.OF_PROJECTS", ())
        tenant.accounts.set_limits(member.key.removeprefix("tml-").partition(".")[0], {"monthly_budget": 0})
    assert member.forward_backward(batch(member.model(), 1)).status_code == 200
    tenant.accounts.set_limits(tenant.project, {"monthly_budget": 0})
    api.services.quotas._limits._found.clear()
    assert member.forward_backward(batch(member.model(), 1)).status_code == 403


def test_usage_stays_with_the_project_that_made_it_and_a_new_month_begins_at_nothing(
    api: Api, stranger: Api, limit: Limit, state_url: str
) -> None:
    model = spend(api, {"training": 6})
    limit(monthly_budget=6)
    assert stranger.forward_backward(batch(stranger.model(), 1)).status_code == 200
    with connect(state_url) as client:
        _next_month(client)
    assert api.get("limits").json["project"]["used"]["monthly_budget"] is None
    assert api.forward_backward(batch(model, 2)).status_code == 200


def _next_month(client: redis.Redis) -> None:
    for key in client.keys("tinsmith:month:*"):
        before, _, month = key.decode().rpartition("/")
        client.rename(key, f"{before}/{int(month) - 1}")


def test_a_budget_of_nothing_pauses_a_project_also_without_prices(api: Api, limit: Limit) -> None:
    model = api.model()
    limit(monthly_budget=0)
    assert api.forward_backward(batch(model, 1)).status_code == 403


def test_amounts_have_the_prices_of_their_base_model(api: Api) -> None:
    train(api, api.model(), {"training": 6, "sampling_sample": 3, "sampling_prefill": 10**9})
    now = this_hour(api)
    answer = events(api, window(now))
    assert {
        one.event_info.type: (one.estimated_cost_usd, one.effective_rate_usd_per_million_tokens) for one in answer.data
    } == {"training": (6, A_TOKEN), "sampling_sample": (6, 2 * A_TOKEN), "sampling_prefill": (None, None)}


def test_storage_has_its_price(api: Api) -> None:
    model = api.model()
    save_checkpoint(api, model, size_bytes=2 * 10**9)
    train(api, model, {"storage": 36 * 10**11})
    (event,) = events(api, window(this_hour(api))).data
    assert event.estimated_cost_usd == pytest.approx(0.5)
    assert event.effective_rate_usd_per_gigabyte_month == pytest.approx(360)
    (item,) = stored(api)
    assert item["estimated_monthly_cost_usd"] == pytest.approx(720)


def storage_rate(api: Api) -> float | None:
    answer = api.get("billing/usage/checkpoints/current")
    return CurrentCheckpointStorageUsageResponse.model_validate(answer.json).effective_rate_usd_per_gigabyte_month


def test_stored_bytes_have_a_rate_if_all_their_base_models_have_the_same(admin: Api) -> None:
    assert storage_rate(admin) is None, "nothing is stored"
    model = admin.model()
    save_checkpoint(admin, model)
    save_checkpoint(admin, model, "sampler_weights", base_model="org/another")
    assert storage_rate(admin) == pytest.approx(360)
    save_checkpoint(admin, model, "external_weights", base_model=DEARER)
    assert storage_rate(admin) is None


def used_by(api: Api) -> list[dict[str, Any]]:
    answer = api.get(window(this_hour(api)).replace("events", "runs"))
    assert answer.status_code == 200, answer.text
    return answer.json["data"]


def test_each_run_has_its_usage_and_cost_and_the_rest_belongs_to_none(api: Api) -> None:
    runs = [api.model(), api.model()]
    prompts = {"sampling_prefill": 5, "sampling_prefill_cached": 3}
    train(api, runs[0], {"training": 6, **prompts, "device": 1500, "checkpoint": 2, "storage": 72 * 10**11})
    train(api, runs[1], {"training": 7, "device": 2500, "checkpoint": 1})
    prefix = str(CheckpointPrefix(runs[0], "sampler_weights", "kept", 1, 1))
    path = save_checkpoint(api, runs[0], "sampler_weights", size_bytes=10, prefix=prefix)
    asked = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": path}
    samplers = [api.post("create_sampling_session", asked).json["sampling_session_id"], api.sampler()]
    for sampler in samplers:
        request = sample(api, sampler).json["request_id"]
        api.services.oplog.finish_sample(request, Result(b"{}"), {"sampling_sample": 4})
    project = api.get("limits").json["project"]["id"]
    none = {
        "project_id": project,
        "base_model": BASE,
        "training_tokens": 0,
        "prefill_tokens": 0,
        "cached_prefill_tokens": 0,
        "sampled_tokens": 0,
        "device_seconds": 0,
        "checkpoints": 0,
        "gigabyte_hours": 0,
        "stored_bytes": 0,
    }
    of_first = {
        "training_tokens": 6,
        "prefill_tokens": 5,
        "cached_prefill_tokens": 3,
        "sampled_tokens": 4,
        "device_seconds": 1.5,
        "checkpoints": 2,
        "gigabyte_hours": 2,
        "stored_bytes": 10,
    }
    of_other = {"training_tokens": 7, "device_seconds": 2.5, "checkpoints": 1}
    assert used_by(api) == [
        {**none, **of_first, "run_id": runs[0], "estimated_cost_usd": 6 + 2 * 4 + 2 * 0.5},
        {**none, "sampled_tokens": 4, "run_id": None, "estimated_cost_usd": 2 * 4},
        {**none, **of_other, "run_id": runs[1], "estimated_cost_usd": 7},
    ]
    assert {one.event_info.type for one in events(api, window(this_hour(api))).data} == {
        *("training", "sampling_sample", "sampling_prefill", "checkpoint", "storage")
    }, "the SDK knows no time of devices"


def test_usage_that_an_earlier_version_counted_belongs_to_no_run(api: Api, state_url: str) -> None:
    run = api.model()
    train(api, run, {"training": 6})
    with connect(state_url) as client:
        (page,) = client.keys("tinsmith:page:usage/*")
        client.hincrby(page, f"training {run.partition(':')[0]} {BASE}", 5)
    assert [(row["run_id"], row["training_tokens"]) for row in used_by(api)] == [(run, 6), (None, 5)]


def test_only_admins_see_the_cost_of_the_month_unless_a_budget_limits_it(
    tenant: Tenant, api: Api, limit: Limit
) -> None:
    train(replace(api, key=tenant.key("member")), tenant.ids["model"], {"training": 6})
    keys = [tenant.key("admin"), tenant.key("member"), tenant.key("viewer")]

    def seen() -> list[float | None]:
        shown = [replace(api, key=key).get("limits").json["project"] for key in keys]
        return [project["used"]["monthly_budget"] for project in shown]

    assert seen() == [6, None, None]
    limit(monthly_budget=10)
    assert seen() == [6, 6, 6]


def test_only_admins_see_the_usage_of_runs_and_only_their_projects(tenant: Tenant, api: Api, stranger: Api) -> None:
    train(replace(api, key=tenant.key("member")), tenant.ids["model"], {"training": 6})
    path = window(this_hour(api)).replace("events", "runs")
    assert tenant.ids["model"] in replace(api, key=tenant.key("admin")).get(path).text
    assert replace(api, key=tenant.key("member")).get(path).status_code == 403
    assert stranger.get(path).json["data"] == []
