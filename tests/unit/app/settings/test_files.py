from __future__ import annotations

from pathlib import Path

import pytest

from app import settings


def test_a_key_that_the_file_and_the_environment_name_is_one_key(tmp_path: Path) -> None:
    """A key is a project where no account has it, and `tinsmith import` asks for one of several."""
    digest = settings.hash_key("tml-0123456789")
    file = tmp_path / "tinsmith.toml"
    file.write_text(f'api_keys = ["{digest}"]\n')
    variables = ("TINSMITH_API_KEY", "TINSMITH_OPERATOR_KEY")
    loaded = settings.load(file, dict.fromkeys(variables, "tml-0123456789"))
    assert (loaded.api_keys, loaded.operator_keys) == ((digest,), (digest,))


def test_a_key_of_the_environment_is_added_to_those_of_the_file(tmp_path: Path) -> None:
    first, second = (settings.hash_key(f"tml-012345678{digit}") for digit in range(2))
    file = tmp_path / "tinsmith.toml"
    file.write_text(f'api_keys = ["{first}"]\noperator_keys = ["{first}"]\n')
    loaded = settings.load(file, {"TINSMITH_OPERATOR_KEY": "tml-0123456781"})
    assert (loaded.api_keys, loaded.operator_keys) == ((first, second), (first, second))


@pytest.mark.parametrize(
    ("state", "broker"),
    [
        ("redis://a:1", "redis://a:1/1"),
        ("redis://:p%40ss@a:1/3", "redis://:p%40ss@a:1/4"),
        ("rediss://a:1/0?ssl_ca_certs=/ca.pem", "rediss://a:1/1?ssl_ca_certs=/ca.pem"),
        ("redis://a:1?db=3", "redis://a:1/4"),
        ("redis://a:1/0?protocol=3&db=3&client_name=x", "redis://a:1/4?protocol=3&client_name=x"),
    ],
)
def test_without_a_broker_the_next_database_is_it_under_the_same_options(state: str, broker: str) -> None:
    assert settings.parse({"redis": {"url": state}}, "a.toml").broker_url == broker
