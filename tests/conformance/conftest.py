from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from app.settings import StoreSettings
from tests.servers_s3 import start_s3

if TYPE_CHECKING:  # torch takes seconds to import, and the store tests do not need it
    from tests.conformance.samplers import Reference
    from workers.backends.sampling.base import SamplerBackend


@pytest.fixture(scope="session")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    with start_s3(tmp_path_factory.mktemp("s3")) as settings:
        yield settings


@pytest.fixture(scope="package")
def float32_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from tests.conformance.samplers import make_reference
    from tests.models import tiny_qwen3

    return make_reference(tiny_qwen3(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="package", params=["transformers", "vllm"])
def sampler(request: pytest.FixtureRequest, float32_reference: Reference) -> Iterator[SamplerBackend]:
    from tests.conformance.samplers import opened

    with opened(request.param, float32_reference) as backend:
        yield backend


@pytest.fixture
def reference(sampler: SamplerBackend, float32_reference: Reference) -> Reference:
    """In the dtype of the sampler."""
    return float32_reference.in_dtype(sampler.describe()["dtype"])
