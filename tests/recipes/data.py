"""Data sets in folders with the names the recipes use on the Hub: `datasets` searches the working directory first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

PREFERENCES, PROMPTS = "Anthropic/hh-rlhf", "zwhe99/DeepMath-103K"
_METALS = ("tin", "zinc", "lead", "iron", "gold", "brass", "copper", "silver")
_OBJECTS = ("pot", "pan", "cup", "lid", "bell", "lamp", "kettle", "funnel")


def lay_out(folder: Path) -> Path:
    """Writes 64 comparisons for training, 8 for tests, and 64 prompts."""
    things = [f"{metal} {thing}" for metal in _METALS for thing in _OBJECTS]
    _write(folder / PREFERENCES / "train.jsonl", map(_comparison, things))
    _write(folder / PREFERENCES / "test.jsonl", map(_comparison, things[::8]))
    _write(folder / PROMPTS / "train.jsonl", ({"question": f"What mends a {thing}?"} for thing in things))
    return folder


def _comparison(thing: str) -> dict[str, str]:
    asked = f"\n\nHuman: Who mends my {thing}?\n\nAssistant: "
    return {"chosen": f"{asked}The tinsmith mends it.", "rejected": f"{asked}Nobody can."}


def _write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
