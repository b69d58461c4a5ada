from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import settings
from app.commands.flower import COLUMNS
from tests.unit.ops.compose import (
    COMPOSE,
    GPU_OVERRIDE,
    ROOT,
    SECOND_TRAINER,
    SECRETS,
    VALUES,
    interpolate,
    load,
    validate,
)

SERVICES: dict[str, dict[str, Any]] = load(COMPOSE)["services"]
TOML = ROOT / "ops" / "docker" / "tinsmith.toml"
TRACING = ROOT / "docs" / "tracing.md"
MODULES = ("gunicorn", "celery", "workers.trainer", "workers.sampler")


@pytest.mark.parametrize("path", [COMPOSE, GPU_OVERRIDE, SECOND_TRAINER], ids=lambda path: path.name)
def test_the_file_meets_the_compose_specification(path: Path):
    validate(interpolate(path.read_text(), VALUES))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("read_only: true", "read_onyl: true"),
        ("condition: service_healthy", "condition: service_well"),
        ("cap_drop: [ALL]", "cap_drop: ALL"),
        ("interval: 10s", "interval: soon"),
    ],
)
def test_a_broken_file_is_caught_by_the_same_check(good: str, bad: str):
    text = interpolate(COMPOSE.read_text(), VALUES)
    assert good in text
    with pytest.raises(ValueError, match=r"\w"):
        validate(text.replace(good, bad))


def test_every_promised_service_is_there():
    assert {"redis", "minio", "api", "trainer", "sampler", "flower"} <= SERVICES.keys()


def test_flower_shows_the_columns_that_the_command_shows():
    assert f"--tasks-columns={COLUMNS}" in SERVICES["flower"]["command"]


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_missing_or_empty_secret_stops_the_start_with_a_message(name: str):
    for values in ({**VALUES, name: ""}, {key: value for key, value in VALUES.items() if key != name}):
        with pytest.raises(KeyError, match=rf"{name}: \w+"):
            interpolate(COMPOSE.read_text(), values)


def test_no_secret_is_written_in_a_file():
    """Every variable named like a secret has no default. Without the optional ones, no answers are kept, and nobody is
    an operator."""
    optional = ("${CAPTURE_SECRET:-}", "${TINSMITH_OPERATOR_KEY:-}")
    raw = yaml.safe_load(COMPOSE.read_text())["services"]
    for service in raw.values():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|KEY|AUTH|SECRET|USER|URL", key):
                required = re.search(r"\$\{\w+:\?[^}]+\}", value)
                assert required or value in optional, key
    assert not re.search("pass|secret|key", TOML.read_text().lower().replace("secrets come from", ""))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_only_the_api_is_published_on_all_interfaces(name: str):
    for port in SERVICES[name].get("ports", []):
        assert name == "api" or port.startswith("127.0.0.1:")


def test_redis_is_not_published_at_all():
    assert "ports" not in SERVICES["redis"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_image_is_pinned_to_a_version(name: str):
    tag = SERVICES[name]["image"].rpartition(":")[2]
    assert re.match(r"v?\d+\.\d+\.\d+|RELEASE\.\d{4}-\d\d-\d\dT", tag)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_can_be_asked_for_its_health(name: str):
    assert SERVICES[name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


@pytest.mark.parametrize("name", ["api", "trainer", "sampler", "flower"])
def test_our_services_wait_for_healthy_stores_and_run_without_privileges(name: str):
    service = SERVICES[name]
    assert service["depends_on"] == {store: {"condition": "service_healthy"} for store in ("redis", "broker", "minio")}
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_file_that_is_mounted_or_built_from_exists(name: str):
    service = SERVICES[name]
    sources = [volume.split(":")[0] for volume in service.get("volumes", [])]
    if "build" in service:
        sources.append(f"./{service['build']['dockerfile']}")
    for source in sources:
        assert not source.startswith(".") or (ROOT / source).is_file(), source


def test_every_named_volume_is_declared_and_used():
    mounted = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    assert {name for name in mounted if name[0] not in "./"} == load(COMPOSE)["volumes"].keys()


@pytest.mark.parametrize("name", ["api", "trainer", "sampler", "flower"])
def test_every_command_names_modules_that_exist(name: str):
    command = SERVICES[name]["command"]
    assert command[:2] == ["python", "-m"]
    assert command[2] in MODULES
    assert importlib.util.find_spec(command[2])
    named = [match[1] for word in command if (match := re.match(r"(?:python:)?((?:app|workers)\.\w+)", word))]
    assert named
    for module in named:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


@pytest.mark.parametrize("name", ["trainer", "sampler"])
def test_the_workers_serve_the_base_model_of_the_settings(name: str):
    (base,) = tomllib.loads(TOML.read_text())["base_models"]
    command = ["python", "-m", f"workers.{name}", "--base", base["name"], "--name", f"{name}-0"]
    assert SERVICES[name]["command"] == command


def test_a_second_trainer_is_the_first_with_a_name_and_a_volume_of_its_own():
    (added,) = load(SECOND_TRAINER)["services"].values()
    assert added.pop("extends") == {"file": COMPOSE.name, "service": "trainer"}
    first = SERVICES["trainer"]
    assert added.keys() == {"container_name", "hostname", "command", "volumes"}
    assert all(added[key] != first[key] for key in added)
    assert added["command"][:-1] == first["command"][:-1]
    assert [volume.split(":")[0] for volume in added["volumes"]] == list(load(SECOND_TRAINER)["volumes"])


def test_nothing_is_looked_up_on_the_internet():
    """Every container that needs the model or its tokenizer has both in a folder."""
    (base,) = settings.load(TOML, {}).base_models
    mounted = f"{VALUES['TINSMITH_MODEL_DIR']}:{base.path}:ro"
    assert all(mounted in SERVICES[name]["volumes"] for name in ("api", "trainer", "sampler"))
    assert not base.tokenizer


def test_the_settings_are_valid_with_the_environment_of_each_service():
    for name in ("api", "trainer", "sampler", "flower"):
        environment = SERVICES[name]["environment"]
        loaded = settings.load(TOML, environment)
        assert loaded.redis.url == f"redis://:{SECRETS['REDIS_PASSWORD']}@redis:6379/0"
        assert (loaded.store.access_key, loaded.store.secret_key) == ("minio-user", "hush2")
        assert environment["TINSMITH_SETTINGS"] == "/etc/tinsmith/tinsmith.toml"
        assert "./ops/docker/tinsmith.toml:/etc/tinsmith/tinsmith.toml:ro" in SERVICES[name]["volumes"]
    assert settings.load(TOML, SERVICES["api"]["environment"]).api_keys == (settings.hash_key("tml-hush-hush3"),)


@pytest.mark.parametrize("name", ["api", "trainer", "sampler"])
def test_the_variables_of_traces_reach_the_processes_that_send_them(name: str):
    """A variable without a value has that of the shell or of .env, and is not set where neither has it."""
    named = set(re.findall(r"OTEL_\w+", TRACING.read_text()))
    assert {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_SAMPLER"} <= named
    environment = SERVICES[name]["environment"]
    assert {variable: environment.get(variable, "missing") for variable in named} == dict.fromkeys(named)


@pytest.mark.parametrize(
    ("path", "name", "default", "chosen"),
    [
        (COMPOSE, "api", "", "tracing"),
        (COMPOSE, "trainer", "train", "train,tracing"),
        (COMPOSE, "sampler", "train", "train,tracing"),
        (GPU_OVERRIDE, "trainer", "vllm", "vllm,tracing"),
        (GPU_OVERRIDE, "sampler", "vllm", "vllm,tracing"),
    ],
)
def test_the_extras_of_an_image_may_be_chosen_for_every_build(path: Path, name: str, default: str, chosen: str):
    def extras(**values: str) -> str:
        services = yaml.safe_load(interpolate(path.read_text(), {**VALUES, **values}))["services"]
        return str(services[name]["build"]["args"]["EXTRAS"])

    variable = "API_EXTRAS" if name == "api" else "WORKER_EXTRAS"
    assert (extras(), extras(**{variable: chosen})) == (default, chosen)
    assert f"{variable}={chosen}" in TRACING.read_text()


def test_new_weights_go_from_trainer_to_sampler_through_memory_they_share():
    mounted = f"handover:{settings.load(TOML, {}).handover_dir}"
    assert all(mounted in SERVICES[name]["volumes"] for name in ("trainer", "sampler"))
    options = load(COMPOSE)["volumes"]["handover"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "uid=10001" in options["o"].split(","), "the workers use only what belongs to their own user"


@pytest.mark.parametrize("name", ["trainer", "sampler"])
def test_health_and_prometheus_ask_the_port_the_worker_serves_metrics_on(name: str):
    base = settings.load(TOML, {}).base_models[0]
    port = getattr(base, name).metrics_port
    assert f":{port}/metrics" in SERVICES[name]["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((ROOT / "ops" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert [f"{name}:{port}"] in [job["static_configs"][0]["targets"] for job in scraped]


def test_the_gpu_override_reserves_a_gpu_for_each_worker():
    override = load(GPU_OVERRIDE)["services"]
    assert override.keys() == {"trainer", "sampler"}
    for service in override.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_images_for_gpus_take_torch_from_the_index_that_pip_is_configured_with():
    for service in load(GPU_OVERRIDE)["services"].values():
        assert service["build"]["args"]["TORCH_INDEX_URL"] == ""
