from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import SetupError
from app.settings import hash_key
from app.settings.files import SECRET_VARIABLES
from app.stack.config import Options, for_every_base_model, resolve

TOML = """
data_dir = "/srv/tinsmith"
[api]
host = "0.0.0.0"
port = 9000
[redis]
url = "redis://file:6379/0"
broker_url = "redis://file:6379/5"
[[base_models]]
name = "small"
path = "/models/small"
max_rank = 8
[base_models.trainer]
zero_stage = 3
[base_models.sampler]
max_batch = 4
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tinsmith.toml"
    path.write_text(TOML)
    return path


def test_without_options_the_file_holds(file):
    settings = resolve(Options(config=file), {})
    assert (settings.api.host, settings.api.port, settings.data_dir) == ("0.0.0.0", 9000, Path("/srv/tinsmith"))
    assert settings.broker_url == "redis://file:6379/5"


def test_options_override_the_file_and_leave_the_rest_of_it(file):
    options = Options(
        config=file, port=0, data_dir=Path("/data"), base_models=(("small", "/other"), ("new", "org/new"))
    )
    settings = resolve(options, {})
    assert (settings.api.host, settings.api.port, settings.data_dir) == ("0.0.0.0", 0, Path("/data"))
    assert [(base.name, base.path, base.max_rank) for base in settings.base_models] == [
        ("small", "/other", 8),
        ("new", "org/new", 128),
    ]


def test_options_override_the_environment_which_overrides_the_file(file):
    environ = {"TINSMITH_REDIS_URL": "redis://environment:6379/0", "TINSMITH_BROKER_URL": "redis://environment:6379/1"}
    assert resolve(Options(config=file), environ).redis.url == "redis://environment:6379/0"
    settings = resolve(Options(config=file, redis="redis://option:6379/0"), environ)
    assert (settings.redis.url, settings.broker_url) == ("redis://option:6379/0", "redis://option:6379/1")


def test_the_secrets_of_urls_and_captures_may_come_from_the_environment(file):
    found = resolve(Options(config=file), {"TINSMITH_URL_SECRET": "s" * 32, "TINSMITH_CAPTURE_SECRET": "c" * 32})
    assert (found.url_secret, found.capture_secret) == ("s" * 32, "c" * 32)


def test_the_operators_key_from_the_environment_is_also_an_api_key(file):
    found = resolve(
        Options(config=file), {"TINSMITH_API_KEY": "tml-0123456789", "TINSMITH_OPERATOR_KEY": "tml-operator"}
    )
    assert found.operator_keys == (hash_key("tml-operator"),)
    assert set(found.api_keys) == {hash_key("tml-0123456789"), hash_key("tml-operator")}
    found = resolve(Options(api_key="tml-0123456789"), {"TINSMITH_OPERATOR_KEY": "tml-operator"})
    assert found.api_keys == (hash_key("tml-0123456789"), hash_key("tml-operator"))


@pytest.mark.parametrize("variable", SECRET_VARIABLES)
def test_an_empty_variable_leaves_what_the_file_says(variable, file):
    """A container passes on an unset variable as an empty one: an empty URL would start an embedded Valkey."""
    at_the_top = f'url_secret = "{"f" * 32}"\ncapture_secret = "{"c" * 32}"\n'
    file.write_text(f'{at_the_top}{TOML}[store]\naccess_key = "access"\nsecret_key = "secret"\n')
    assert resolve(Options(config=file), {variable: ""}) == resolve(Options(config=file), {})


def test_worker_options_hold_for_every_base_model(file):
    options = Options(config=file, base_models=(("new", "org/new"),), trainer="torch", trainers=2, sampler="vllm")
    settings = for_every_base_model(resolve(options, {}), options)
    assert [(b.trainer.backend, b.trainer.count, b.sampler.backend) for b in settings.base_models] == [
        ("torch", 2, "vllm")
    ] * 2
    assert [b.trainer.zero_stage for b in settings.base_models] == [3, 2]
    assert settings.base_models[0].sampler.max_batch == 4


def test_the_given_key_is_the_only_one_and_kept_as_a_digest():
    settings = resolve(Options(api_key="tml-0123456789"), {"TINSMITH_API_KEY": "tml-from-the-environment"})
    assert settings.api_keys == (hash_key("tml-0123456789"),)


@pytest.mark.parametrize("key", ["sk-0123456789", "tml-", "tml-short"])
def test_a_key_the_sdk_would_refuse_is_refused_without_repeating_it(key):
    with pytest.raises(SetupError, match="--api-key must start with 'tml-'") as caught:
        resolve(Options(api_key=key), {})
    assert key == "tml-" or key not in str(caught.value)


@pytest.mark.parametrize("variable", ["TINSMITH_API_KEY", "TINSMITH_OPERATOR_KEY"])
def test_such_a_key_in_a_variable_is_refused_too(variable):
    with pytest.raises(SetupError, match=f"{variable} must start with 'tml-'") as caught:
        resolve(Options(), {variable: "sk-0123456789"})
    assert "sk-0123456789" not in str(caught.value)


def test_an_unknown_key_in_the_file_is_named(tmp_path):
    path = tmp_path / "tinsmith.toml"
    path.write_text("[api]\nprot = 1\n")
    with pytest.raises(SetupError, match=r"tinsmith.toml: api.prot"):
        resolve(Options(config=path), {})
