"""The console shows and changes what the API would for the same key."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from html import unescape
from typing import Any, cast

import pytest
import redis

from app.domain.progress import Point, Recorded
from app.domain.results import Result
from app.services.tenants.accounts import AccountService
from app.stores.objects.accounts import AccountFiles
from app.stores.redis import keys
from app.stores.redis.durability import NotDurable
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import OwnedElsewhere
from tests.unit.app.api.test_archives import stored
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.api.test_queue import set_worker
from tests.unit.app.conftest import BASE, OTHER_KEY, Api, batch
from tests.unit.app.console.conftest import FORMS, Browser
from tests.unit.app.console.test_account import rows
from tests.unit.app.tenant import make_tenant


def listed(api: Api) -> Any:
    """The checkpoints as the API lists them."""
    return cast(Any, api.get("checkpoints").json)["checkpoints"]


def trained(api: Api, losses: list[float]) -> str:
    """A run with a step for each loss."""
    model = api.model(api.session())
    lease = api.services.oplog.acquire(model, "node/test")
    assert not isinstance(lease, OwnedElsewhere)
    for step, loss in enumerate(losses):
        for seq, point in (
            (2 * step + 1, Point("forward_backward", {"loss:sum": 10 * loss}, 100, 10.0, 2.0)),
            (2 * step + 2, Point("optim_step", {"grad_norm": 0.25})),
        ):
            if point.kind == "forward_backward":
                api.forward_backward(batch(model, seq))
            else:
                api.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}})
            api.services.oplog.commit(lease, seq, Result(b"{}"), point=point)
    return model


def test_runs_are_listed_with_steps_and_loss(api: Api, browser: Callable[..., Browser]) -> None:
    model = trained(api, [3.0, 1.25])
    page = browser().get("runs")
    row = re.findall(r"<tr>.*?</tr>", page.text, re.DOTALL)[1]
    assert re.findall(r'<td class="num">(.*?)</td>', row)[:2] == ["2", "1.25"]
    assert f'href="/console/runs/{model}"' in unescape(row).replace("%3A", ":")


def test_the_part_that_is_loaded_again_is_the_table_alone(api: Api, browser: Callable[..., Browser]) -> None:
    trained(api, [1.0])
    part = browser().get("runs", HX_Request="true")
    assert "<table>" in part.text and "<html" not in part.text


@pytest.mark.parametrize("page", ["runs", "runs/{model}"])
def test_a_page_that_is_loaded_every_few_seconds_reads_no_checkpoints(
    api: Api, browser: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    model = trained(api, [1.0])
    save_checkpoint(api, model)
    logged_in = browser()
    monkeypatch.setattr(RedisRecords, "readable_checkpoints", lambda *_: pytest.fail("the checkpoints were read"))
    assert logged_in.get(page.format(model=model), HX_Request="true").status_code == 200


def test_a_run_shows_a_curve_for_each_value(api: Api, browser: Callable[..., Browser]) -> None:
    model = trained(api, [3.0, 2.0, 1.25])
    page = browser().get(f"runs/{model}").text
    titles = re.findall(r"<figcaption>(\S+) <strong>(\S+)</strong>", page)
    assert titles == [("loss", "1.25"), ("grad_norm", "0.25"), ("tokens/s", "50")]
    assert "from 3 at step 1 to 1.25 at step 3" in page


def test_the_curves_are_downloaded_as_csv(api: Api, browser: Callable[..., Browser]) -> None:
    model = trained(api, [3.0, 1.25])
    answer = browser().get(f"runs/{model}/curves.csv")
    rows = list(csv.DictReader(answer.text.splitlines()))
    assert answer.mimetype == "text/csv"
    assert [(row["step"], row["tokens"], row["loss"], row["grad_norm"]) for row in rows] == [
        ("1", "100", "3.0", "0.25"),
        ("2", "100", "1.25", "0.25"),
    ]


def test_metrics_of_a_client_are_drawn_downloaded_and_compared(api: Api, browser: Callable[..., Browser]) -> None:
    model = trained(api, [3.0, 1.25])
    api.services.records.record(model, [Recorded(0, {"reward": 0.25}), Recorded(2, {"reward": 0.75})])
    logged_in = browser()
    for page in (f"runs/{model}", f"compare?run={model}"):
        assert "client/reward: " in logged_in.get(page).text and "to 0.75 at step 2" in logged_in.get(page).text
    rows = list(csv.DictReader(logged_in.get(f"runs/{model}/curves.csv").text.splitlines()))
    assert [(row["step"], row["tokens"], row["grad_norm"], row["client/reward"]) for row in rows] == [
        ("0", "", "", "0.25"),
        ("1", "100", "0.25", ""),
        ("2", "100", "0.25", "0.75"),
    ]


def test_runs_are_compared_in_one_chart(api: Api, browser: Callable[..., Browser]) -> None:
    one, other = trained(api, [3.0, 2.0]), trained(api, [2.5])
    page = browser().get(f"compare?run={one}&run={other}").text
    chart = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)[0]
    assert len(re.findall(r'<path class="line c[01]" d="M', chart)) == 2
    assert page.count("checked") == 2


def test_nothing_of_a_stranger_is_seen_or_changed(api: Api, browser: Callable[..., Browser]) -> None:
    model = trained(api, [3.0])
    path = save_checkpoint(api, model)
    stranger = browser(OTHER_KEY)
    assert model not in stranger.get("runs").text and model not in stranger.get("checkpoints").text
    for page in (f"runs/{model}", f"runs/{model}/curves.csv", f"compare?run={model}"):
        assert stranger.get(page).status_code == 404
    for form in FORMS:
        assert stranger.post(form, path=path, public="yes", days="7", sure="yes").status_code == 404
    (kept,) = listed(api)
    assert not kept["public"] and "expires_at" not in kept


def test_a_key_that_may_not_manage_is_refused_in_words(api: Api, browser: Callable[..., Browser]) -> None:
    tenant = make_tenant(api, AccountService(AccountFiles(api.services.objects), api.services.records))
    answer = browser(tenant.key("member", ["train"])).post("checkpoints/delete", path=tenant.ids["path"], sure="yes")
    assert answer.status_code == 403 and "scope manage" in answer.text


def test_a_checkpoint_is_published_and_made_private(api: Api, browser: Callable[..., Browser]) -> None:
    path = save_checkpoint(api, api.model())
    logged_in = browser()
    for public in ("yes", "no"):
        assert logged_in.post("checkpoints/publish", path=path, public=public, to="run").status_code == 302
        (found,) = listed(api)
        assert found["public"] == (public == "yes")


def test_a_checkpoint_expires_after_days_or_never(api: Api, browser: Callable[..., Browser]) -> None:
    path = save_checkpoint(api, api.model())
    logged_in = browser()
    logged_in.post("checkpoints/expiry", path=path, days="7")
    (found,) = listed(api)
    assert "expires_at" in found
    assert "Keep for ever" in logged_in.get("checkpoints").text
    logged_in.post("checkpoints/expiry", path=path)
    (found,) = listed(api)
    assert "expires_at" not in found
    for days in ("nan", "inf", "-1", "0.5", "x", "", "0", "3651", "9" * 5000):
        assert logged_in.post("checkpoints/expiry", path=path, days=days).status_code == 400
    assert listed(api) == [found]


def test_a_checkpoint_is_deleted_only_after_a_second_press(api: Api, browser: Callable[..., Browser]) -> None:
    path = save_checkpoint(api, api.model())
    logged_in = browser()
    asked = logged_in.post("checkpoints/delete", path=path)
    assert asked.status_code == 200 and path in asked.text
    assert len(listed(api)) == 1
    logged_in.post("checkpoints/delete", path=path, sure="yes")
    assert listed(api) == []


def test_waiting_calls_are_shown_with_their_position_start_and_reason(
    api: Api, browser: Callable[..., Browser]
) -> None:
    set_worker(api, "trainer", f"train.{BASE}", pace_s=3.0)
    model = api.model()
    for seq in (1, 2, 3):
        api.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}})
    page = browser().get("queue").text
    shown = [
        (kind, state, place, start, why) for _, kind, state, place, start, _, why in rows(page, "Your waiting calls")
    ]
    assert shown == [
        ("optim_step", "waiting", "1", "0 s", "it runs now, or starts next"),
        ("optim_step", "waiting", "2", "3 s", "1 call runs before it, for about 3 s"),
        ("optim_step", "waiting", "3", "6 s", "about 2 calls run before it, for about 6 s"),
    ]
    assert [cells[0] for cells in rows(page, "Workers")] == ["sampler-0", "trainer-0"]


def test_the_worker_that_holds_a_run_is_shown_beside_it_and_only_to_those_who_see_the_run(
    api: Api, browser: Callable[..., Browser]
) -> None:
    model = trained(api, [1.0])
    node = next(iter(api.services.bases.workers()))
    api.services.oplog._redis.set(keys.lease(model), f"{node}/boot")
    own = browser()
    assert f'href="/console/runs/{model}"' in own.get("queue").text.replace("%3A", ":")
    assert f"<dt>Held by</dt><dd>{node.partition('@')[0]}</dd>" in own.get(f"runs/{model}").text
    assert model[:8] not in browser(OTHER_KEY).get("queue").text


def test_a_checkpoint_is_downloaded_from_the_address_that_the_browser_uses(
    api: Api, browser: Callable[..., Browser]
) -> None:
    path = f"tinker://{stored(api, 'archived/console')}/weights/a"
    logged_in = browser()
    (link,) = re.findall(r'href="/console/(checkpoints/download[^"]+)"', logged_in.get("checkpoints").text)
    answer = logged_in.get(unescape(link))
    assert answer.status_code == 302 and answer.headers["Location"].startswith("/api/v1/archives/")
    assert api.client.get(answer.headers["Location"]).mimetype == "application/x-tar"
    assert browser(OTHER_KEY).get(f"checkpoints/download?path={path}").status_code == 404


def test_text_of_a_client_is_text_on_the_page(api: Api, browser: Callable[..., Browser]) -> None:
    model = api.model(user_metadata={"<b>name</b>": "<script>alert(1)</script>"})
    page = browser().get(f"runs/{model}").text
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<b>" not in page


def test_a_browser_loads_all_from_this_server_and_keeps_no_page(api: Api, browser: Callable[..., Browser]) -> None:
    logged_in = browser()
    page = logged_in.get("runs")
    policy = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "form-action")} == {"'self'"}
    assert page.headers["Cache-Control"] == "no-store"
    assets = re.findall(r'(?:src|href)="/console/(static/[^"]*)"', page.text)
    assert {"static/console.css", "static/console.js"} < set(assets)
    for asset in assets:
        assert logged_in.get(asset).status_code == 200
    assert "://" not in page.text and " style=" not in page.text and "<script>" not in page.text


def test_a_page_beyond_the_last_does_not_say_that_there_are_no_runs(api: Api, browser: Callable[..., Browser]) -> None:
    trained(api, [1.0])
    page = browser().get("runs?offset=25").text
    assert "No run yet" not in page and "of 1" in page


def test_metrics_of_many_names_make_a_page_of_bounded_size(api: Api, browser: Callable[..., Browser]) -> None:
    model = api.model(api.session())
    lease = api.services.oplog.acquire(model, "node/test")
    assert not isinstance(lease, OwnedElsewhere)
    for seq in range(1, 61, 2):
        metrics = {f"custom/{seq}-{number}:sum": 1.0 for number in range(15)}
        for step, point in ((0, Point("forward_backward", metrics, 1, 1.0, 1.0)), (1, Point("optim_step"))):
            if step:
                api.post("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": {}})
            else:
                api.forward_backward(batch(model, seq))
            api.services.oplog.commit(lease, seq + step, Result(b"{}"), point=point)
    logged_in = browser()
    assert logged_in.get(f"runs/{model}").text.count("<figure>") == 32
    assert len(logged_in.get(f"runs/{model}/curves.csv").text.splitlines()[0].split(",")) == 5 + 256


def test_in_an_outage_a_part_of_a_page_says_so(
    api: Api, browser: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged_in = browser()
    monkeypatch.setattr(api.services.records, "progress", lambda *_: _raise(redis.ConnectionError()))
    page, part = logged_in.get("runs"), logged_in.get("runs", HX_Request="true")
    assert page.status_code == part.status_code == 503
    assert "does not answer" in page.text and "does not answer" in part.text
    assert "<html" in page.text and "<html" not in part.text


def test_an_error_of_redis_that_is_no_outage_is_not_called_one_and_the_log_has_it(
    api: Api, browser: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged_in, fault = browser(), redis.ResponseError("WRONGTYPE")
    monkeypatch.setattr(api.services.records, "progress", lambda *_: _raise(fault))
    page = logged_in.get("runs")
    assert page.status_code == 500 and "its log has the cause" in page.text
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [fault]


def test_a_state_server_that_may_lose_calls_is_a_page_with_the_reason(
    api: Api, browser: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged_in = browser()
    monkeypatch.setattr(api.services.records, "progress", lambda *_: _raise(NotDurable("set appendonly")))
    page = logged_in.get("runs")
    assert page.status_code == 503 and "set appendonly" in page.text


def _raise(error: Exception) -> None:
    raise error


def test_a_run_that_does_not_exist_is_a_page_in_words(browser: Callable[..., Browser]) -> None:
    answer = browser().get("runs/none")
    assert answer.status_code == 404 and "does not exist" in answer.text
