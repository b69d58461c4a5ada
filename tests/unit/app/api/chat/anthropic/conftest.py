from __future__ import annotations

import pytest

from tests.unit.app.api.chat.anthropic.caller import Anthropic
from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.conftest import Api


@pytest.fixture
def anthropic(served: tuple[Api, Standin]) -> Anthropic:
    return Anthropic(*served)
