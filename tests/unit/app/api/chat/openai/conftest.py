from __future__ import annotations

import pytest

from tests.unit.app.api.chat.openai.caller import OpenAi
from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.conftest import Api


@pytest.fixture
def openai(served: tuple[Api, Standin]) -> OpenAi:
    return OpenAi(*served)
