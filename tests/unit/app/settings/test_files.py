from __future__ import annotations

from pathlib import Path

from app import settings


def test_a_key_that_the_file_and_the_environment_name_is_one_key(tmp_path: Path) -> None:
    """A key is a project where no account has it, and `tinsmith import` asks for one of several."""
    digest = settings.hash_key("tml-0123456789")
    file = tmp_path / "tinsmith.toml"
    file.write_text(f'api_keys = ["{digest}"]\n')
    variables = ("TINSMITH_API_KEY", "TINSMITH_OPERATOR_KEY")
    loaded = settings.load(file, dict.fromkeys(variables, "tml-0123456789"))
    assert (loaded.api_keys, loaded.operator_keys) == ((digest,), (digest,))
