"""The effort that a chat template knows."""

from __future__ import annotations

import pytest

from app.services.openai.requests import Effort, known_effort


@pytest.mark.parametrize(
    ("template", "given", "known"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ reasoning_effort }}", "xhigh", "high"),
        ("{{ reasoning_effort }} to the max", "max", "high"),
        ("{{ reasoning_effort }}", 0.99, 0.99),
        ("{{ {'high': 3, 'xhigh': 4}[reasoning_effort] }}", "max", "xhigh"),
        ('{{ {"high": 3, "max": 4}[reasoning_effort] }}', "xhigh", "max"),
        ("{{ {'xhigh': 4, 'max': 5}[reasoning_effort] }}", "xhigh", "xhigh"),
        ("{{ {'xhigh': 4, 'max': 5}[reasoning_effort] }}", "max", "max"),
    ],
)
def test_an_effort_above_high_is_one_that_the_template_names(template: str, given: Effort, known: Effort):
    assert known_effort(template, given) == known
