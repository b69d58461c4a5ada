from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from app import cli

HEAVY = ("torch", "vllm", "deepspeed", "transformers", "workers", "flask", "celery", "redis", "pydantic")


def run(*arguments: str) -> int:
    """The exit code, however it is given."""
    try:
        return cli.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the following arguments are required: COMMAND; see `tinsmith --help`"),
        (("down",), "invalid choice: 'down'"),
        (("up", "--bogus"), "tinsmith up: unknown option or argument '--bogus'; see `tinsmith up --help`"),
        (("up", "--por", "1"), "unknown option or argument '--por'"),
        (("demo", "extra"), "tinsmith demo: unknown option or argument 'extra'; see `tinsmith demo --help`"),
        (("up", "--port", "http"), "argument --port: invalid int value: 'http'"),
        (("up", "--port", "70000"), "api.port: Input should be less than or equal to 65535 (got 70000)"),
        (("up", "--trainers", "0"), "'0' is not a whole number of at least 1"),
        (("up", "--trainer", "jax"), "invalid choice: 'jax' (choose from 'deepspeed', 'torch')"),
        (("up", "--base-model", "name"), "'name' is not NAME=PATH_OR_HUB_ID"),
        (("up", "--api-key", "secret"), "--api-key must start with 'tml-'"),
        (("up", "--config", "/no/such.toml"), "cannot read the config file /no/such.toml: No such file or directory"),
        (("up", "--base-model", "m=/no/such"), "base model 'm': there is no folder '/no/such'"),
        (("up", "--base-model", "m=o/m", "--trainer", "torch", "--ranks", "2"), "use --ranks 1 or --trainer deepspeed"),
        (
            ("up", "--base-model", "m=o/m", "--redis", "redis://127.0.0.1:1/0"),
            "cannot use Redis at redis://127.0.0.1:1",
        ),
        (("up", "--base-model", "m=o/m", "--s3", "http://127.0.0.1:1/bucket"), "http://127.0.0.1:1 does not answer"),
        (("up", "--base-model", "m=o/m", "--s3", "ftp://host/bucket"), "is not file:///folder or http(s)://"),
        (("up", "--data-dir", "/dev/null/data"), "cannot write to the data folder /dev/null/data: Not a directory"),
        (("rebuild", "--port", "1"), "tinsmith rebuild: unknown option or argument '--port'"),
        (("rebuild",), "no stack has run on tinsmith-data: start `tinsmith up` on it first, or name the state server"),
        (("rebuild", "--redis", "redis://:secret@127.0.0.1:1/0"), "cannot use Redis at redis://127.0.0.1:1/0"),
        (("rebuild", "--redis", "127.0.0.1:1"), "Redis URL must specify one of the following schemes"),
        (("up", "--host", "203.0.113.1"), "cannot listen on 203.0.113.1:0: Cannot assign requested address"),
    ],
)
def test_what_cannot_work_is_one_line_with_the_remedy_and_exit_code_2(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    free = ("--port", "0") if arguments[:1] == ("up",) and "--port" not in arguments else ()
    assert run(*arguments[:1], *free, *arguments[1:]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert said in output.err
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize("text", ['[store]\nsecret_kye = "hunter2"', 'secret = {key = "hunter2"}'])
def test_the_value_of_a_misspelt_setting_is_not_shown(text, tmp_path, capsys):
    """It may be a secret."""
    config = tmp_path / "tinsmith.toml"
    config.write_text(text)
    assert run("up", "--config", str(config)) == 2
    said = capsys.readouterr().err
    assert "Extra inputs are not permitted" in said
    assert "hunter2" not in said


def test_a_busy_port_is_exit_code_2_before_anything_is_made(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert run("up", "--port", port, "--data-dir", str(tmp_path / "data")) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_the_help_of_up_names_every_option_and_an_example(capsys):
    assert run("up", "--help") == 0
    text = capsys.readouterr().out
    options = "config host port data-dir base-model api-key trainer sampler trainers samplers ranks zero-stage redis s3"
    assert [name for name in options.split() if f"--{name} " not in text] == []
    assert "tinsmith up --base-model" in text


def test_the_help_names_every_command(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in ("up", "demo", "rebuild", "version"))


def test_help_loads_nothing_heavy():
    program = (
        "import sys\nfrom app import cli\ntry:\n    cli.main(['up', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
