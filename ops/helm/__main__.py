"""`python -m ops.helm` lints, renders and validates the chart with each set of values."""

from __future__ import annotations

import sys

import helm_python
import jsonschema

from ops.helm import chart


def main() -> int:
    """Returns the number of mistakes, each of which it prints."""
    mistakes = 0
    for path in chart.VALUES:
        values = chart.values_of(path)
        found = chart.lint(values)
        manifests = []
        try:
            manifests = chart.render(values)
        except helm_python.HelmError as error:
            found.append(str(error))
        for manifest in manifests:
            try:
                chart.validate(manifest)
            except jsonschema.ValidationError as error:
                found.append(f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}")
        for mistake in found:
            print(f"{path.name}: {mistake}", file=sys.stderr)
        print(f"{path.name}: {len(manifests)} manifests, {len(found)} mistakes")
        mistakes += len(found)
    return mistakes


if __name__ == "__main__":
    sys.exit(main() > 0)
