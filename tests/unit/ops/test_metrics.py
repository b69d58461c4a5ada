"""docs/metrics.md lists each exported metric, with its labels and its help text."""

from __future__ import annotations

import re
from pathlib import Path

from tests.exported_metrics import exported

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(tinsmith_[a-z_]+)` \| ([a-z_, ]*) ?\| (.+) \|$", re.MULTILINE)


def test_the_page_lists_each_metric_with_its_labels_and_help_text():
    rows = [(name, labels.strip(), text) for name, labels, text in ROW.findall(PAGE.read_text())]
    assert sorted(rows) == sorted((metric.name, ", ".join(metric.labels), metric.help) for metric in exported())


def test_no_label_is_an_id():
    labels = {label for metric in exported() for label in metric.labels}
    assert labels == {
        *("base_model", "cache", "error", "gpu", "kind", "operation", "queue", "role", "route", "stage", "state"),
        *("status", "use"),
    }
