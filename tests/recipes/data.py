"""Data sets in folders with the names the recipes use on the Hub: `datasets` searches the working directory first."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHATS, PREFERENCES = "HuggingFaceH4/no_robots", "Anthropic/hh-rlhf"
PROMPTS, PROBLEMS = "zwhe99/DeepMath-103K", "openai/gsm8k"
ANSWER = 12
"""The answer of every problem."""
_METALS = ("tin", "zinc", "lead", "iron", "gold", "brass", "copper", "silver")
_OBJECTS = ("pot", "pan", "cup", "lid", "bell", "lamp", "kettle", "funnel")
_WORK = ("mends", "makes", "paints", "sells", "buys", "cleans", "bends", "melts")


def lay_out(folder: Path) -> Path:
    """Writes 512 conversations and 512 comparisons for training, 16 of each for tests, 64 prompts and 128 problems."""
    for name, row in ((CHATS, _chat), (PREFERENCES, _comparison)):
        _write(folder / name / "train.jsonl", row, len(_METALS) * len(_OBJECTS) * len(_WORK))
        _write(folder / name / "test.jsonl", row, 16)
    _write(folder / PROMPTS / "train.jsonl", _prompt, 64)
    _write(folder / PROBLEMS / "train.jsonl", _problem, 128)
    configs = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    (folder / PROBLEMS / "README.md").write_text(f"---\n{configs}---\n")
    return folder


def _chat(work: str, thing: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Who {work} my {thing}?"},
            {"role": "assistant", "content": f"The tinsmith {work} it."},
        ]
    }


def _comparison(work: str, thing: str) -> dict[str, Any]:
    asked = f"\n\nHuman: Who {work} my {thing}?\n\nAssistant: "
    return {"chosen": f"{asked}The tinsmith {work} it.", "rejected": f"{asked}Nobody can."}


def _prompt(work: str, thing: str) -> dict[str, Any]:
    return {"question": f"Who {work} a {thing}?"}


def _problem(work: str, thing: str) -> dict[str, Any]:
    question = f"A {thing} costs 3. One {work} 4 of them. What do they cost?"
    return {"question": question, "answer": f"4 x 3 = {ANSWER} #### {ANSWER}"}


def _write(path: Path, row: Callable[[str, str], dict[str, Any]], count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    every = itertools.islice(itertools.product(_WORK, _METALS, _OBJECTS), count)
    path.write_text("".join(f"{json.dumps(row(work, f'{metal} {thing}'))}\n" for work, metal, thing in every))
