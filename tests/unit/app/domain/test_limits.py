"""Limits, and the settings section that gives every project its own."""

from __future__ import annotations

import pytest

from app import settings
from app.domain.limits import Limits
from app.errors import SetupError


def test_the_settings_limit_every_project():
    found = settings.parse({"limits": {"project": {"live_models": 4, "requests_per_s": 0.5}}}, "here")
    assert found.limits.project == Limits(requests_per_s=0.5, live_models=4)
    assert settings.parse({}, "here").limits.project == Limits()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"live_models": -1}, {"tokens_per_s": 0}, {"live_models": 2.5}, {"live_model": 2}),
        *({"weight": 0}, {"weight": 1e-10}, {"weight": 1e308}),
        *({"checkpoint_ttl_s": 3599}, {"checkpoint_ttl_s": 315_360_001}, {"checkpoint_ttl_s": 0}),
        *({"keep_checkpoints": 0}, {"keep_checkpoints": 1.5}, {"keep_checkpoints": 1001}),
        *({"monthly_budget": -1}, {"monthly_budget": float("inf")}),
        *({"capture_days": 0}, {"capture_days": 3651}),
    ],
)
def test_a_limit_that_makes_no_sense_is_named(wrong):
    with pytest.raises(SetupError, match=next(iter(wrong))):
        settings.parse({"limits": {"project": wrong}}, "here")
