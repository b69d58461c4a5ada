from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.world import World, world
from tests.unit.app.conftest import api, app, settings, state_url

__all__ = ["api", "app", "fuzzed", "settings", "state_url"]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("fuzz")) as made:
        yield made
        print(f"\n{made.report()}")
