"""Settings of tenants that would have no effect are refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import SetupError
from app.settings import Settings, tenants
from app.stack import checks

DAYS = {"limits": {"project": {"capture_days": 7}}}
BUDGET = {"limits": {"project": {"monthly_budget": 5.0}}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"api_keys": ("a" * 64,), "operator_keys": ("a" * 64, "b" * 64)},
            "operator_keys has a digest that is not in api_keys",
        ),
        (BUDGET, r"monthly_budget is 5, and nothing has a price.*\[prices\]"),
        (DAYS, "set it to 32 random characters"),
        ({"capture_secret": "c" * 31}, "capture_secret has 31 characters"),
    ],
    ids=["an operator's key that is no key", "a budget without prices", "captures without a secret", "a short secret"],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, Any], said: str) -> None:
    for check in (tenants.check, checks.everything):
        with pytest.raises(SetupError, match=said):
            check(Settings(**given))


@pytest.mark.parametrize(
    "given",
    [
        {"limits": {"project": {"monthly_budget": 0}}},
        {**BUDGET, "prices": {"device_hour": 2}},
        {**BUDGET, "base_models": ({"name": "small", "path": "/m", "prices": {"training": 0.0}},)},
        {**DAYS, "capture_secret": "c" * 32},
    ],
    ids=["a budget that pauses all projects", "a price", "a price of a base model", "captures with a secret"],
)
def test_what_has_an_effect_is_taken(given: dict[str, Any]) -> None:
    tenants.check(Settings(**given))
