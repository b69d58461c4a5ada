"""A process loads only the libraries that it needs: the API and Flower are installed without those of the workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import SETTINGS_VARIABLE
from tests.tokenizers import byte_tokenizer

WORKERS = {"torch", "transformers", "vllm", "deepspeed", "peft", "safetensors"}


def loaded(code: str, **environ: str) -> set[str]:
    """The top-level packages that a new process has after `code`."""
    probe = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", probe], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_api_process_loads_no_gpu_library_and_no_worker(tmp_path: Path) -> None:
    config = tmp_path / "tinsmith.toml"
    config.write_text(f'data_dir = "{tmp_path}"\n[redis]\nurl = "redis://127.0.0.1:1"\n')
    found = loaded("import app.wsgi", **{SETTINGS_VARIABLE: str(config)})
    assert "flask" in found
    assert not found & {*WORKERS, "workers"}


def test_the_domain_alone_loads_no_web_framework() -> None:
    assert "flask" not in loaded("import app.domain.ops, app.wire.results")


def test_a_tokenizer_loads_no_gpu_library(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path)
    code = f"""
from pathlib import Path
from app.services.openai.tokenizer import read
tokenizer = read(Path({str(folder)!r}))
tokenizer.encode_rendered(tokenizer.chat_text([{{"role": "user", "content": "hi"}}], []), 1000)"""
    assert not loaded(code) & WORKERS


@pytest.mark.parametrize("module", ["workers.process.runtime", "workers.backends.sampling.base"])
def test_what_flower_and_the_choice_of_a_sampler_need_loads_no_library_of_the_workers(module: str) -> None:
    """Flower imports the tasks, and the `flower` extra installs none of these libraries."""
    assert not loaded(f"import {module}") & WORKERS
