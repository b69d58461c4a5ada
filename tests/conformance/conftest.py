from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.settings import StoreSettings
from tests.servers_s3 import start_s3


@pytest.fixture(scope="session")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    with start_s3(tmp_path_factory.mktemp("s3")) as settings:
        yield settings
