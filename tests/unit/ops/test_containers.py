from __future__ import annotations

import pytest
import yaml

from app import settings
from ops.containers import images, trial
from tests.unit.ops.compose import COMPOSE, ROOT, load

SERVICES = load(COMPOSE)["services"]
STARTED = {name for name, service in SERVICES.items() if "profiles" not in service}


def test_every_service_that_starts_by_itself_is_killed_in_the_trial():
    assert set(trial.KILLED) == STARTED


def test_every_service_of_ours_is_checked_for_its_rights():
    assert set(trial.OURS) == {name for name, service in SERVICES.items() if "build" in service}


def test_an_engine_without_a_network_builds_every_image_in_the_machines_own():
    override = yaml.safe_load((ROOT / "ops" / "containers" / "build.yml").read_text())["services"]
    assert override == {name: {"build": {"network": "host"}} for name in trial.OURS}


def test_the_base_image_is_the_one_that_every_dockerfile_begins_with():
    assert images.base_image() == "python:3.11.15-slim-bookworm"


def test_the_settings_for_two_ranks_differ_in_that_alone(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "FOLDER", tmp_path)
    services = yaml.safe_load(trial.two_ranks().read_text())["services"]
    assert services == {name: {"volumes": services["api"]["volumes"]} for name in trial.OURS}
    one, two = (
        settings.load(file, {}) for file in (ROOT / "ops" / "docker" / "tinsmith.toml", tmp_path / "ranks.toml")
    )
    assert two.base_models[0].trainer.ranks == 2
    changed = one.model_dump()
    changed["base_models"][0]["trainer"]["ranks"] = 2
    assert two.model_dump() == changed


def test_the_log_of_the_last_run_names_every_promise():
    log = (ROOT / "ops" / "containers" / "results" / "compose-train.log").read_text()
    assert all(f"{name} killed (SIGKILL)" in log for name in STARTED)
    assert log.rstrip().endswith("everything was as promised")
