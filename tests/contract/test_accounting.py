"""Usage, storage and the audit log for administrators: through the SDK, sync and async, and the CLI."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from collections import Counter
from collections.abc import Coroutine
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from tests.contract.data import project_of, sentences, supervised, train
from tests.contract.stack import API_KEY, BASE, Stack

pytestmark = [
    pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS, DRAWN = 2, 3
HOUR = timedelta(hours=1)


def awaited(of: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(of)


def window() -> tuple[str, str]:
    """From the last hour to the end of this one, as strings for the SDK's methods."""
    now = datetime.fromtimestamp(time.time() // 3600 * 3600, UTC)
    return (now - HOUR).isoformat(), (now + HOUR).isoformat()


@pytest.fixture(scope="module")
def admin(stack: Stack) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=stack.url, api_key=API_KEY)


@pytest.fixture(scope="module")
def rest(stack: Stack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.url, api_key=API_KEY)


@pytest.fixture(scope="module")
def saved(stack: Stack) -> str:
    """Checkpoint path of a run that was trained, with its base model sampled in the same session."""
    with tinker.ServiceClient(base_url=stack.url, api_key=API_KEY, user_metadata={"team": "a"}) as client:
        training = client.create_lora_training_client(base_model=BASE, rank=8).result()
        train(training, STEPS)
        prompt = types.ModelInput.from_ints(sentences(1)[0])
        params = types.SamplingParams(max_tokens=DRAWN, stop=[])
        client.create_sampling_client(base_model=BASE).sample(prompt, 2, params).result()
        return training.save_state("kept").result().path


def session_of(path: str) -> str:
    return path.removeprefix("tinker://").partition(":train:")[0]


def amounts(usage: types.BillingUsageResponse, session: str) -> Counter[str]:
    """Usage of a session by event type, over all hours."""
    found: Counter[str] = Counter()
    for event in usage.data:
        if event.session_id == session:
            info = event.event_info
            found[info.type] += info.count if isinstance(info, types.CheckpointBillingEvent) else info.token_count
    return found


def expected() -> dict[str, int]:
    return {
        "training": STEPS * sum(len(datum.model_input.to_ints()) for datum in supervised()),
        "sampling_prefill": len(sentences(1)[0]),
        "sampling_sample": 2 * DRAWN,
        "checkpoint": 1,
    }


def test_a_session_used_what_its_client_sent_and_drew(admin: tinker.AdminClient, rest: tinker.RestClient, saved: str):
    start, end = window()
    session = session_of(saved)
    usage = admin.get_billing_usage(start, end).result()
    assert amounts(usage, session) == expected()
    assert usage.sessions[session].user_metadata == {"team": "a"}
    [first, *_] = [event for event in usage.data if event.session_id == session]
    assert (first.base_model, first.project_id) == (BASE, project_of(rest, session_of(saved)))
    same = [
        awaited(admin.get_billing_usage_async(start, end)),
        rest.get_billing_usage(start, end).result(),
        awaited(rest.get_billing_usage_async(start, end)),
    ]
    assert [amounts(each, session) for each in same] == [expected()] * 3
    with pytest.raises(tinker.BadRequestError, match="14 days"):
        admin.get_billing_usage("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z").result()


def test_storage_is_what_the_checkpoints_take(admin: tinker.AdminClient, rest: tinker.RestClient, saved: str):
    project = project_of(rest, session_of(saved))
    checkpoints = rest.list_user_checkpoints(limit=1000).result().checkpoints
    stored = admin.get_current_checkpoint_storage_usage().result()
    assert sum(item.checkpoint_count for item in stored.data) == len(checkpoints) > 0
    assert sum(item.size_bytes for item in stored.data) == sum(found.size_bytes for found in checkpoints)
    assert {item.project_id for item in stored.data} == {project}
    same = [
        awaited(admin.get_current_checkpoint_storage_usage_async()),
        rest.get_current_checkpoint_storage_usage(project_id=project).result(),
        awaited(rest.get_current_checkpoint_storage_usage_async(project_id=project)),
    ]
    assert same == [stored] * 3
    with pytest.raises(tinker.NotFoundError, match="no-such-project"):
        admin.get_current_checkpoint_storage_usage("no-such-project").result()


def test_the_audit_log_records_what_was_done_to_a_checkpoint(
    admin: tinker.AdminClient, rest: tinker.RestClient, saved: str
):
    rest.publish_checkpoint_from_tinker_path(saved).result()
    rest.unpublish_checkpoint_from_tinker_path(saved).result()
    days = [datetime.now(UTC).date() - timedelta(days=back) for back in (1, 0)]
    logs = [admin.get_audit_log("checkpoints", day).result() for day in days]
    logged = [entry for log in logs for entry in log.entries if entry.event_details.get("tinker_path") == saved]
    assert [entry.event for entry in logged][-3:] == ["checkpoint_save", "checkpoint_publish", "checkpoint_unpublish"]
    assert all(isinstance(entry.event_details["key_id"], str) for entry in logged)
    same = [
        awaited(admin.get_audit_log_async("checkpoints", days[1])),
        rest.get_audit_log("checkpoints", days[1]).result(),
        awaited(rest.get_audit_log_async("checkpoints", days[1])),
    ]
    assert same == [logs[1]] * 3
    assert admin.get_audit_log(day=date(2026, 1, 1)).result().entries == []


def test_usage_and_storage_on_the_command_line(
    stack: Stack, saved: str, rest: tinker.RestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TINKER_BASE_URL", stack.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main_cli, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    used = json.loads(run("--format", "json", "billing", "usage", *window()))
    assert used["sessions"][session_of(saved)] == {"user_metadata": {"team": "a"}}
    assert "hourly usage row(s)" in run("billing", "usage", *window())
    run("billing", "usage", *window(), "--csv", str(tmp_path / "usage.csv"))
    with (tmp_path / "usage.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["session_id"] == session_of(saved)]
    assert {row["type"] for row in rows} == expected().keys()
    stored = json.loads(run("--format", "json", "billing", "checkpoint-storage"))
    assert stored["data"][0]["checkpoint_count"] == len(rest.list_user_checkpoints(limit=1000).result().checkpoints)
