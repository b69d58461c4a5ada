"""`tinsmith flower` starts only where it works and where it is not open to everybody."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app import cli
from app.commands import flower
from app.errors import SetupError
from app.stack.config import Options


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "::", "dashboard.example"])
def test_an_address_for_others_needs_a_login(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWER_BASIC_AUTH", raising=False)
    with pytest.raises(SetupError, match=f"{address} would show every call .* FLOWER_BASIC_AUTH"):
        flower.flower(Options(data_dir=tmp_path), address, 5555)


@pytest.mark.parametrize(("address", "login"), [("127.0.0.1", ""), ("::1", ""), ("localhost", ""), ("0.0.0.0", "a:b")])
def test_a_folder_without_a_stack_is_an_error(
    address: str, login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_BASIC_AUTH", login)
    with pytest.raises(SetupError, match="no stack has run on"):
        flower.flower(Options(data_dir=tmp_path), address, 5555)


def test_without_the_package_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r'pip install "tinsmith\[flower\]"'):
        flower.flower(Options(data_dir=tmp_path), "127.0.0.1", 5555)


@pytest.mark.parametrize("login", ["foo", "a:", ":b", "a:b,c"])
def test_a_login_without_a_user_or_a_password_is_refused(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_BASIC_AUTH", login)
    with pytest.raises(SetupError, match="FLOWER_BASIC_AUTH must be user:password"):
        flower.flower(Options(data_dir=tmp_path), "127.0.0.1", 5555)


def test_a_port_that_is_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINSMITH_SETTINGS", str(tmp_path / "tinsmith.toml"))
    (tmp_path / "tinsmith.toml").write_text('[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert cli.main(["flower", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; stop the process" in said
    assert "another port with --port;" in said
    with pytest.raises(SystemExit):
        cli.main(["flower", "--port", "99999"])
    assert "'99999' is above 65535" in capsys.readouterr().err
