"""Base models of the benchmarks."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from app.demo import model
from app.settings import BaseModelSettings, SamplerSettings

_TINY_BUILDER = Path(__file__).parents[2] / "tests" / "models.py"
_BUILD = (
    "import pathlib, runpy, sys; "
    "runpy.run_path(sys.argv[1])['tiny_qwen3'](pathlib.Path(sys.argv[2]), vocab_size=int(sys.argv[3]))"
)
# Kept between runs: converting takes 25 s.
_KEPT = Path("data/bench/models")
_SAMPLER = SamplerSettings(backend="transformers")
TINY_VOCAB_SIZE = 320


def write_tokenizer(folder: Path) -> None:
    """Saves the tests' byte-level tokenizer in a model's folder."""
    runpy.run_path(str(_TINY_BUILDER))["byte_tokenizer"]().save_pretrained(folder)


def tiny(folder: Path, vocab_size: int = TINY_VOCAB_SIZE) -> BaseModelSettings:
    """The tests' random Qwen3, fp32: a step of it has almost no compute.

    A separate process makes it, so that torch's threads are not in the process that measures.
    """
    command = [sys.executable, "-c", _BUILD, str(_TINY_BUILDER), str(folder), str(vocab_size)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return BaseModelSettings(name="bench/tiny-qwen3", path=str(folder), dtype="float32", sampler=_SAMPLER)


def bundled() -> BaseModelSettings:
    """SmolLM2-135M-Instruct in bfloat16."""
    models = _KEPT.absolute()
    models.mkdir(parents=True, exist_ok=True)
    model.ensure(models, lambda line: print(line, file=sys.stderr, flush=True))
    path = model.folder(models)
    return BaseModelSettings(name=model.NAME, path=str(path), dtype="bfloat16", sampler=_SAMPLER)
