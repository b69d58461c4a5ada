"""The Helm chart: lints and renders it with a set of values, and validates every manifest.

kubernetes-validate knows Kubernetes' own kinds. Each custom kind has a schema in schemas/, of the fields that the chart
uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml

FOLDER = Path(__file__).parent
CHART = FOLDER / "tinsmith"
VALUES = tuple(sorted((FOLDER / "values").glob("*.yaml")))
# The oldest one that the chart supports, and the newest one that kubernetes-validate knows.
KUBERNETES = ("1.30", "1.37")
RELEASE, NAMESPACE = "tinsmith", "ml"
_LEAST_SEVERITY = 2
_SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "schemas").glob("*.json")}
_TEMPLATES = ("leaderTemplate", "workerTemplate")

Manifest = dict[str, Any]


def values_of(path: Path) -> Manifest:
    """The values of a file."""
    return dict(yaml.safe_load(path.read_text()))


def lint(values: Mapping[str, Any]) -> list[str]:
    """Returns the warnings and errors of `helm lint --strict`, which also checks the values."""
    report = helm_python.lint(CHART, dict(values), strict=True, kube_version=f"v{KUBERNETES[-1]}.0")
    found = [message["error"] for message in report["messages"] if message["severity"] >= _LEAST_SEVERITY]
    return [*found, *report["errors"]]


def render(values: Mapping[str, Any]) -> list[Manifest]:
    """The manifests that Helm would install. Raises HelmError when the values are refused."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(dict(values)))
        files = chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)
    texts = (text for name, text in sorted(files.items()) if name.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def validate(manifest: Manifest) -> None:
    """Raises jsonschema's ValidationError when Kubernetes, or a custom kind's controller, would refuse the manifest."""
    schema = _SCHEMAS.get(manifest["kind"].lower())
    if schema is None:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, schema)
    for pod in pods(manifest):
        validate(pod)


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """The pods that a workload makes."""
    spec = manifest.get("spec", {})
    groups = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), *(groups.get(name) for name in _TEMPLATES)):
        if template:
            metadata = {"name": "pod", **template["metadata"]}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def containers(manifest: Manifest) -> Iterator[Manifest]:
    """The containers of these pods."""
    for pod in pods(manifest):
        yield from pod["spec"]["containers"]
