"""The chart as Helm renders it with each set of values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from app.settings import Settings, load
from ops.helm import chart

SETS = [path.stem for path in chart.VALUES]
Manifest = dict[str, Any]


def values(name: str) -> Manifest:
    return chart.values_of(chart.FOLDER / "values" / f"{name}.yaml")


@cache
def _manifests(name: str) -> list[Manifest]:
    return chart.render(values(name))


def manifests(name: str, kind: str = "") -> list[Manifest]:
    """Copies of the manifests of this kind, or of all."""
    return [copy.deepcopy(one) for one in _manifests(name) if kind in ("", one["kind"])]


def manifest(name: str, kind: str, ending: str) -> Manifest:
    """The manifest of this kind whose name has this ending."""
    (found,) = [one for one in manifests(name, kind) if one["metadata"]["name"].endswith(ending)]
    return found


def containers(name: str) -> Iterator[tuple[str, Manifest]]:
    """Each container, with the name of its workload."""
    for one in manifests(name):
        for container in chart.containers(one):
            yield one["metadata"]["name"], container


def environment(container: Manifest) -> dict[str, str]:
    """The environment as Kubernetes sets it, with a text in the place of each secret."""
    found: dict[str, str] = {}
    for one in container.get("env", []):
        secret = "tml-hush-hush" if one["name"] in ("TINSMITH_API_KEY", "TINSMITH_OPERATOR_KEY") else "hush"
        text = one.get("value", secret)
        for name, value in found.items():
            text = text.replace(f"$({name})", value)
        found[one["name"]] = text
    if "TINSMITH_REDIS_URL" in found and found["TINSMITH_REDIS_URL"] == "hush":
        found |= dict.fromkeys(("TINSMITH_REDIS_URL", "TINSMITH_BROKER_URL"), "redis://:hush@redis:6379/0")
    return found


def settings(name: str, folder: Path, container: Manifest) -> Settings:
    """The settings as this container loads them."""
    file = folder / "tinsmith.toml"
    file.write_text(manifest(name, "ConfigMap", "-settings")["data"]["tinsmith.toml"])
    return load(file, environment(container))
