"""The PEFT files of a LoRA adapter, and the shapes of the adapters and weights of a base model.

Trainers report the shapes. A report has one row for all layers that are alike, because it is sent with every heartbeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TENSORS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
FILES = (CONFIG_FILE, TENSORS_FILE)
KEY_PREFIX = "base_model.model."
"""The start of a module's name in a PEFT file."""

Shape = tuple[int, int, int]
"""(in features, out features, experts) of the tensor under a pair; a linear has 1 expert."""
Shapes = Mapping[str, Mapping[str, Shape]]
"""The shape of each pair by its path in PEFT files, by group (attn, mlp, unembed)."""

_LAYER = re.compile(r"\.([0-9]+)(?=\.)")
_MARK = "*"


def rows(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> list[list[Any]]:
    """The report: rows of group, path, shape and layers. The path has `*` in the place of each of the layers; without
    layers it is the path itself."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for group, paths in shapes.items():
        for path, shape in paths.items():
            layer = _LAYER.search(path)
            pattern = _LAYER.sub(f".{_MARK}", path, count=1)
            layers = found.setdefault((group, pattern, tuple(shape)), [])
            if layer:
                layers.append(int(layer[1]))
    return [[group, pattern, list(shape), layers] for (group, pattern, shape), layers in found.items()]


def of_rows(report: Iterable[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """The inverse of `rows`."""
    found: dict[str, dict[str, Any]] = {}
    for group, pattern, shape, layers in report:
        paths = [pattern.replace(_MARK, str(layer), 1) for layer in layers] or [pattern]
        found.setdefault(group, {}).update(dict.fromkeys(paths, tuple(shape)))
    return found


def tensors(paths: Mapping[str, Shape], rank: int) -> dict[str, tuple[int, int]]:
    """The shapes of an adapter's tensors by their names in a PEFT file: for each path A [experts · rank, in] and
    B [out, rank · experts]."""
    found = {}
    for path, (in_features, out_features, experts) in paths.items():
        found[f"{KEY_PREFIX}{path}.lora_A.weight"] = (experts * rank, in_features)
        found[f"{KEY_PREFIX}{path}.lora_B.weight"] = (out_features, rank * experts)
    return found
