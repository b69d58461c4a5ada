from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.contract.stack import BASE, Stack, running
from tests.models import tiny_qwen3
from tests.servers import free_port

os.environ["HF_HUB_OFFLINE"] = "1"

STACKS = {
    "deepspeed-1-transformers": {
        "trainer": 'backend = "deepspeed"\nzero_stage = 2',
        "sampler": 'backend = "transformers"',
    },
    "deepspeed-2-ranks-vllm": {
        "trainer": 'backend = "deepspeed"\nzero_stage = 3\nranks = 2',
        "sampler": 'backend = "vllm"\nmemory_share = 0.25\nmax_batch = 16',
    },
}


@pytest.fixture(scope="session")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session", params=list(STACKS))
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack") / "data"
    with running(Stack(folder, base_path, free_port(), **STACKS[request.param])) as stack:
        yield stack


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    with stack.client() as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
