"""`tinsmith completion` prints scripts that complete commands, options and files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from app import cli

_ASK = """
source {script}
compopt() {{ :; }}
COMP_WORDS=({words} "{begun}")
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_tinsmith
printf "%s\\n" "${{COMPREPLY[@]}}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "begun", "expected"),
    [
        ("tinsmith", "mo", ["models"]),
        ("tinsmith", "comp", ["completion"]),
        ("tinsmith models", "", ["add"]),
        ("tinsmith models add", "--j", ["--json"]),
        ("tinsmith admin limits", "s", ["set"]),
        ("tinsmith up --trainer", "", ["deepspeed", "torch"]),
        ("tinsmith up --config", "tin", ["tinsmith.toml"]),
        ("tinsmith up --quiet", "--po", ["--port"]),
        ("tinsmith status", "--trainer", [""]),
    ],
)
def test_bash_completes(
    words: str, begun: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    (tmp_path / "tinsmith.toml").touch()
    asked = _ASK.format(script=tmp_path / "script", words=words, begun=begun)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert {"bash": "complete -o", "zsh": "#compdef tinsmith", "fish": "complete -c tinsmith"}[shell] in text
    assert all(command in text for command in ("doctor", "init", "models", "completion", "--data-dir"))
    if shell != "bash":
        assert "write a config file for this machine" in text and "as a comment with its default" not in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
