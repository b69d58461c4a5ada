"""Checks a Hugging Face folder with all weights of a model, against the base model that it claims to be.

The trainer that loads it checks its configuration too, which only transformers can read fully
(workers/models/full_weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from app.domain.records import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from app.errors import BadRequest
from app.services.imports import safetensors
from app.settings import LimitSettings
from app.wire.bodies import parse_json

_GENERATION_FILE = "generation_config.json"


def read(folder: Path, arch: str, shapes: Mapping[str, tuple[int, ...]], limits: LimitSettings) -> dict[str, Path]:
    """The files of the checkpoint by name. `shapes` are those of the base model's weights, by their names in such
    files; `arch` is its class. Raises BadRequest for a folder without all weights of such a model."""
    config = _json(folder / CONFIG_FILE, limits)
    if config.get("architectures") != [arch]:
        found = f"{config.get('architectures')!r:.200}"
        raise BadRequest(f"{CONFIG_FILE}: architectures is {found}, but this base model is [{arch!r}]")
    if config.get("quantization_config"):
        raise BadRequest(f"{CONFIG_FILE} has a quantization_config; only plain weights are accepted")
    weights = sorted(folder.glob("model*.safetensors"))
    _check_index(folder, {path.name for path in weights}, limits)
    _check_tensors(weights, shapes)
    others = [folder / name for name in (CONFIG_FILE, _GENERATION_FILE, WEIGHTS_INDEX_FILE, *TOKENIZER_FILES)]
    return {path.name: path for path in [*weights, *others] if path.is_file()}


def _check_index(folder: Path, files: Set[str], limits: LimitSettings) -> None:
    if (folder / WEIGHTS_INDEX_FILE).is_file():
        named = _json(folder / WEIGHTS_INDEX_FILE, limits).get("weight_map")
        wanted = set(map(str, named.values())) if isinstance(named, dict) else set()
        if wanted != files:
            raise BadRequest(
                f"{WEIGHTS_INDEX_FILE} names {', '.join(sorted(wanted))[:200] or 'no files'}, but the folder has "
                f"{', '.join(sorted(files))[:200] or 'none'}"
            )
    elif files != {WEIGHTS_FILE}:
        raise BadRequest(f"{folder.name} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}; no other format is read")


def _check_tensors(files: list[Path], shapes: Mapping[str, tuple[int, ...]]) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        found |= safetensors.read_shapes(file, safetensors.MOST_HEADER)
    for name, wanted in sorted(shapes.items()):
        # Files have experts stacked or one by one, so the trainer that loads them checks them. Trainers of earlier
        # versions report experts stacked.
        if found.get(name) != wanted and (name in found or ".experts." not in name):
            there = f"has the shape {list(found[name])}" if name in found else "is missing"
            raise BadRequest(f"{name} {there}, but this base model needs {list(wanted)}")


def _json(file: Path, limits: LimitSettings) -> dict[str, Any]:
    try:
        found = parse_json(file.read_bytes(), limits)
    except FileNotFoundError:
        raise BadRequest(f"there is no {file.name}") from None
    except (BadRequest, RecursionError) as error:
        raise BadRequest(f"{file.name}: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest(f"{file.name} is not a JSON object")
    return found
