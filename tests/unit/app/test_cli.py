from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest

from app import cli

HEAVY = ("torch", "vllm", "deepspeed", "transformers", "workers", "flask", "celery", "redis", "pydantic")


def run(*arguments: str) -> int:
    """Runs the command; returns its exit code."""
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
        (("up", "--ranks", "0"), "'0' is not a whole number of at least 1"),
        (("up", "--trainers", "-1"), "'-1' is not a whole number of at least 0"),
        (("up", "--trainer", "jax"), "invalid choice: 'jax' (choose from "),
        (("up", "--base-model", "name"), "'name' is not NAME=PATH_OR_HUB_ID"),
        (("up", "--api-key", "secret"), "--api-key must start with 'tml-'"),
        (("up", "--config", "/no/such.toml"), "cannot read the config file /no/such.toml: No such file or directory"),
        (
            ("up", "--base-model", "m=o/m", "--trainers", "0", "--samplers", "0"),
            "no base model has a worker: set --train",
        ),
        (("init", "--model", "/no/such"), "there is no folder '/no/such'; give an existing folder, or a Hugging Face"),
        (("models", "add", ""), "base model '': there is no folder ''; give an existing folder, or a Hugging Face"),
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
        (("rebuild", "--redis", "127.0.0.1:1"), "command line: redis.url: give the URL of a Redis server"),
        (("rebuild", "--redis", "redis+sentinel://:secret@127.0.0.1:1/s"), "redis.broker_url: the broker is one Redis"),
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


def test_a_wrong_choice_is_answered_with_the_right_ones(capsys):
    assert run("up", "--trainer", "jax") == 2
    # Python 3.11 quotes them.
    assert "(choose from deepspeed, torch)" in capsys.readouterr().err.replace("'", "")


def test_output_that_nothing_reads_is_no_traceback():
    unread, output = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", "app.cli", "completion", "zsh"]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    os.close(output)
    assert (done.returncode, done.stderr) == (141, "")


WRONG = """
api_keys = "tml-hunter2"
[api]
prot = 1
port = 70000
[redis]
url = 5551234
[store]
secret_kye = "hunter2"
[[base_models]]
path = "/models/small"
router_replay = "often"
weights_id = "main"
trainer = {backend = "jax", zero_stage = 9, exact = "maybe"}
full = "hunter2"
[limits.project]
weight = 5000
"""


def test_all_mistakes_of_a_config_file_are_said_at_once_and_no_value_that_may_be_a_secrets(tmp_path, capsys):
    config = tmp_path / "tinsmith.toml"
    config.write_text(WRONG)
    assert run("up", "--config", str(config)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"tinsmith: {config} has 13 mistakes:",
        "  api_keys: Input should be a list",
        "  api.port: Input should be less than or equal to 65535 (got 70000)",
        "  api.prot: there is no such setting; did you mean 'port'?",
        "  redis.url: Input should be a valid string",
        "  store.secret_kye: there is no such setting; did you mean 'secret_key'?",
        "  limits.project: weight is 5000.0: give a number from 0.001 to 1000",
        "  base_models.0.name: Field required",
        "  base_models.0.router_replay: Input should be a valid boolean, unable to interpret input (got 'often')",
        "  base_models.0.weights_id: String should match pattern '^([0-9a-f]{16})?$' (got 'main')",
        "  base_models.0.trainer.backend: Input should be 'deepspeed' or 'torch' (got 'jax')",
        "  base_models.0.trainer.zero_stage: Input should be 0, 1, 2 or 3 (got 9)",
        "  base_models.0.trainer.exact: Input should be a valid boolean, unable to interpret input or Input should be "
        "'auto' (got 'maybe')",
        "  base_models.0.full: this is a section of settings, not one value",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[api]\nprot = 1", "api.prot: there is no such setting; did you mean 'port'?"),
        (b'secret = {key = "hunter2"}', "secret: there is no such setting; did you mean 'url_secret'?"),
        (b"[limits.project]\nweigth = 2", "limits.project.weigth: there is no such setting; did you mean 'weight'?"),
        (
            b"[[base_models]]\nname = 'a'\npath = 'o/a'\ndtype = 'int4'",
            "'bfloat16', 'nf4', 'int8' or 'fp8' (got 'int4')",
        ),
        (b"[tracing]\nendpoint = 'collector:4318'", "tracing.endpoint: give a URL that begins with http://"),
        (b"[tracing]\nendpoint = 'http://'", "tracing.endpoint: give a URL that begins with http://"),
        (b"[tracing]\nendpoint = 'https://?x'", "tracing.endpoint: give a URL that begins with http://"),
        (b"[tracing]\nendpoint = 'ftp://user:hunter2@collector'", "tracing.endpoint: give a URL that begins"),
        (b"xyz = 1", "xyz: there is no such setting\n"),
        (b"[base_models]\nname = 'a'", "base_models: this is a list of sections; write [[base_models]]"),
        (b"[api]\nport = 1\nport = 2", "is not valid TOML: Cannot overwrite a value"),
        (b'api_keys = ["tml-hunter2"]', "api_keys: one of these is not the sha256 digest of a key"),
        (b'operator_keys = ["' + b"A" * 64 + b'"]', "operator_keys: one of these is not the sha256 digest of a key"),
        (
            b"[[base_models]]\nname = 'a'\npath = 'o/a'\n[[base_models]]\nname = 'a'\npath = 'o/b'",
            "base_models: several have the name 'a'; give each base model a name of its own\n",
        ),
        (
            b"[[base_models]]\nname = 'a'\npath = 'o/a'\ntrainer = {metrics_port = 91000}",
            "base_models.0.trainer.metrics_port: Input should be less than or equal to 65535 (got 91000)",
        ),
        (b"[api\nport = 1", "is not valid TOML: "),
        (b"[api]\nhost = '\xff'", "is not UTF-8 text"),
    ],
)
def test_one_mistake_of_a_config_file_is_one_line(text, said, tmp_path, capsys):
    config = tmp_path / "tinsmith.toml"
    config.write_bytes(text)
    assert run("up", "--config", str(config)) == 2
    error = capsys.readouterr().err
    assert str(config) in error and said in error and "hunter2" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("text", ["redis = 5", "api_keys = 5", "store = ['s']"])
def test_a_secret_from_the_environment_does_not_hide_that_its_section_is_wrong(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    for variable in ("TINSMITH_S3_SECRET_KEY", "TINSMITH_API_KEY"):
        monkeypatch.setenv(variable, "tml-hunter2-hunter2")
    config = tmp_path / "tinsmith.toml"
    config.write_text(text)
    assert run("up", "--config", str(config)) == 2
    error = capsys.readouterr().err
    assert f"{config}: {text.split()[0]}: " in error and "hunter2" not in error


def test_the_option_version_prints_what_the_command_does(capsys):
    assert run("version") == 0
    printed = capsys.readouterr().out
    assert run("--version") == 0
    assert capsys.readouterr().out == printed == f"tinsmith {version('tinsmith')}\n"


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


def test_the_help_of_a_kind_keeps_its_capitals(capsys):
    assert run("admin", "key", "--help") == 0
    assert "API keys." in capsys.readouterr().out


def test_a_count_is_written_in_ascii_digits(capsys):
    for text in ("\u0663", "\u00b2", "0", "-1"):  # an Arabic three, and a superscript two
        assert run("up", "--ranks", text) == 2
        assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_help_loads_nothing_heavy():
    program = (
        "import sys\nfrom app import cli\ntry:\n    cli.main(['up', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
