"""The quickstart works with the installed wheel, in a folder outside the checkout, command by command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.contract.snippets import ROOT, blocks
from tests.models import tiny_qwen3
from tests.servers import free_port

_START_S = 600
_PLACEHOLDER = "tinker://4f1d.../sampler_weights/sft"
# Installing needs the network; the other model, a download of 1.2 GB.
_NOT_HERE = re.compile(r"sudo |make setup|.*--model")
_TINY, _BUNDLED = "tiny", "tinsmith-data/models/SmolLM2-135M-Instruct"


def test_each_command_of_the_page_works_outside_the_checkout(tmp_path: Path):
    install(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    tiny_qwen3(tmp_path / _TINY)
    init, up, sft, *asking = commands()
    shell(f"{init} --model {_TINY}", tmp_path)
    with running([*up.split(), f"--port={free_port()}"], tmp_path) as url:
        trained = shell(sft, tmp_path, url)
        (path,) = re.findall(r"^sample it as: (\S+)$", trained, re.MULTILINE)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", trained)]
        assert len(losses) == 16 and losses[-1] < losses[0]
        answers = [shell(command.replace(_PLACEHOLDER, path), tmp_path, url) for command in asking]
    assert len(answers) == 2 and '"choices":' in answers[0]
    assert answers[1].removesuffix("\n"), "the greedy answer of a tiny model may be blanks"
    (program,) = [block.text for block in blocks() if (block.page, block.kind) == ("quickstart.md", "python")]
    shell(f".venv/bin/python -c '{program.replace(_BUNDLED, _TINY)}'", tmp_path)


def commands() -> list[str]:
    """The page's commands that run here, in order."""
    lines = "".join(block.text for block in blocks() if (block.page, block.kind) == ("quickstart.md", "shell"))
    return [line for line in lines.splitlines() if not _NOT_HERE.match(line)]


def install(folder: Path) -> None:
    """Makes `.venv` with the wheel. Everything that the project requires comes from this environment."""
    source = folder / "source"
    source.mkdir()
    for name in ("app", "workers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={folder}", str(source)]
    subprocess.run([*pip, *wheel], check=True)
    environment = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (built,) = folder.glob("*.whl")
    python = str(environment / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", str(built)], check=True, env=env())
    # Not before: pip would find the project there. A path in this file does not bring in the .pth files there, and so
    # not the checkout.
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    where = subprocess.check_output([python, "-c", "import app; print(app.__file__)"], cwd=folder, env=env(), text=True)
    assert where.startswith(str(packages))


def env(**more: str) -> dict[str, str]:
    """The environment of this process, without what would lead into the checkout."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "TINKER_"))},
        "HF_HUB_OFFLINE": "1",
        **more,
    }


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[str]:
    """Runs `tinsmith up`; the value is the URL that it prints when it is ready."""
    up = subprocess.Popen(
        command, cwd=folder, env=env(OMP_NUM_THREADS="2"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(_START_S, up.kill)
    timer.start()
    output: list[str] = []
    try:
        assert up.stdout is not None
        for line in up.stdout:
            output.append(line)
            if line.startswith("ready "):
                break
        else:
            raise RuntimeError("the stack did not start:\n" + "".join(output))
        timer.cancel()
        threading.Thread(target=up.stdout.read, daemon=True).start()
        yield output[-1].split()[1]
    finally:
        timer.cancel()
        up.send_signal(signal.SIGTERM)
        up.wait(240)


def shell(command: str, folder: Path, url: str = "") -> str:
    """Runs a command as the reader does; returns its output."""
    environment = env(**({"TINKER_BASE_URL": url} if url else {}))
    ran = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
