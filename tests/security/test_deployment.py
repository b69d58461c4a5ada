"""Exposure of docker-compose.yml and the Dockerfiles; tests/unit/ops shows that they are well-formed and pinned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.dispatch import celery_app
from app.settings import RedisSettings, Settings
from tests.unit.ops.compose import COMPOSE, GPU_OVERRIDE, ROOT, SECRETS, VALUES, load

SERVICES: dict[str, dict[str, Any]] = load(COMPOSE)["services"]
OURS = ("api", "trainer", "sampler", "flower")
DOCKERFILES = sorted((ROOT / "ops").rglob("*.Dockerfile"))
FILES = [COMPOSE, GPU_OVERRIDE, *DOCKERFILES, *sorted((ROOT / "ops").rglob("*.toml")), ROOT / "ops/redis/valkey.conf"]
DEFAULTS = ("minioadmin", "changeme", "password123", "guest:guest", "admin:admin", "tml-")
OPENS_THE_HOST = ("privileged", "network_mode", "pid", "ipc", "userns_mode", "devices", "cap_add")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_gets_more_of_the_host_than_its_own_volumes(name: str) -> None:
    service = SERVICES[name]
    assert [key for key in OPENS_THE_HOST if key in service] == []
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["read_only"], "nothing but volumes and tmpfs is written to"
    mounts = [volume for volume in service.get("volumes", []) if isinstance(volume, str)]
    assert [mount for mount in mounts if re.match(r"/(etc|var/run|proc|sys|root)?(:|/docker)|~", mount)] == []


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_host_folders_are_mounted_read_only(name: str) -> None:
    """A bind mount begins with a dot, a slash or a variable; the rest are volumes that Docker keeps."""
    bound = [volume for volume in SERVICES[name].get("volumes", []) if volume[0] in "./$"]
    assert [volume for volume in bound if not volume.endswith(":ro")] == []


@pytest.mark.parametrize("name", ["redis", "broker"])
def test_redis_asks_for_a_password_and_is_reached_by_services_alone(name: str) -> None:
    service = SERVICES[name]
    assert "ports" not in service
    assert "requirepass $$REDISCLI_AUTH" in service["command"][-1]
    assert service["environment"]["REDISCLI_AUTH"] == VALUES["REDIS_PASSWORD"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_secret_is_on_a_command_line(name: str) -> None:
    """Every user of the host can read it."""
    service = SERVICES[name]
    lines = [str(service.get("command", "")), str(service.get("entrypoint", "")), str(service["healthcheck"]["test"])]
    assert [line for line in lines for secret in SECRETS if VALUES[secret] in line] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_default_credential_is_anywhere(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert [line for line in lines for known in DEFAULTS if known in line.lower()] == []


def test_flower_is_behind_a_password_and_on_this_host_alone() -> None:
    service = SERVICES["flower"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert any("auth" in str(entry).lower() for entry in [*service["command"], *service["environment"]])
    assert "FLOWER_UNAUTHENTICATED_API" not in str(service)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_holds_no_secret_and_fetches_nothing_unchecked(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^(ARG|ENV) \w*(KEY|PASSWORD|SECRET|TOKEN)", text, re.M)
    assert not re.search(r"^ADD ", text, re.M)
    assert not re.search(r"(curl|wget)\b[^\n]*\|", text)
    assert re.findall(r"^USER (\S+)", text, re.M)[-1:] == ["10001"]


def test_a_message_is_json_or_is_not_read(tmp_path: Path) -> None:
    """An attacker who writes to the broker must not get a pickle loaded; and no result is ever kept there."""
    conf = celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(url="redis://localhost:1/0"))).conf
    assert (conf.accept_content, conf.task_serializer) == (["json"], "json")
    assert set(conf.result_accept_content or ["json"]) == {"json"}
    assert (conf.result_backend, conf.task_ignore_result) == (None, True)
