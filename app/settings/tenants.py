"""Checks of the settings of tenants (their keys, budgets and kept answers) that concern several sections."""

from __future__ import annotations

from app.domain.prices import Prices
from app.errors import SetupError
from app.settings.root import Settings

_LEAST_SECRET = 32


def check(settings: Settings) -> None:
    """Raises SetupError for operators' keys, a budget or kept answers that would have no effect."""
    if not set(settings.operator_keys) <= set(settings.api_keys):
        raise SetupError("operator_keys has a digest that is not in api_keys: add it there too")
    _check_budget(settings)
    _check_captures(settings)


def _check_budget(settings: Settings) -> None:
    """Checks that usage has a price if projects have a monthly budget: without prices, nothing uses it up."""
    limit = settings.limits.project.monthly_budget
    if limit and {settings.prices, *(base.prices for base in settings.base_models)} == {Prices()}:
        raise SetupError(
            f"limits.project.monthly_budget is {limit:g}, and nothing has a price: set some in the section [prices]"
        )


def _check_captures(settings: Settings) -> None:
    """Checks that the secret of kept answers is long, and that there is one where every project keeps them."""
    if 0 < len(settings.capture_secret) < _LEAST_SECRET:
        raise SetupError(
            f"capture_secret has {len(settings.capture_secret)} characters: set it to {_LEAST_SECRET} random ones"
        )
    if settings.limits.project.capture_days and not settings.capture_secret:
        raise SetupError(
            "limits.project.capture_days keeps answers only where capture_secret encrypts them: set it to 32 random "
            "characters"
        )
