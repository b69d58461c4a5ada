from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.contract.stack import BASE, Stack, running
from tests.models import tiny_qwen3
from tests.servers import free_port, start_valkey
from tests.servers_s3 import start_s3

os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).parents[2]
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
PROXY = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
STACKS = {
    "deepspeed-1-transformers": {
        "trainer": 'backend = "deepspeed"\nzero_stage = 2',
        "sampler": 'backend = "transformers"',
        "full": 'backend = "torch"',
        "full_sampler": 'backend = "transformers"',
    },
    "deepspeed-2-ranks-vllm": {
        "trainer": 'backend = "deepspeed"\nzero_stage = 3\nranks = 2',
        "sampler": 'backend = "vllm"\nmemory_share = 0.25\nmax_batch = 16\nsleep = true',
    },
}


@pytest.fixture(scope="session")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="package", params=list(STACKS))
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    """Two stacks. Their user is in a folder with files that have the names of modules, and in a job of two ranks, and
    has a proxy.

    The first keeps everything in its data folder. The second uses an external state server and S3 server, and its
    clients exchange their keys for tokens and compress their batches.
    """
    folder = tmp_path_factory.mktemp("stack")
    with contextlib.ExitStack() as servers:
        outside = "" if request.param == "deepspeed-1-transformers" else _outside(servers, folder)
        user = {"cwd": _shadows(folder / "user"), "environ": {"PYTHONPATH": str(ROOT), **RANK, **PROXY}}
        stack = Stack(folder / "data", base_path, free_port(), extra=outside, **STACKS[request.param], **user)
        yield servers.enter_context(running(stack))


def _shadows(folder: Path) -> Path:
    folder.mkdir()
    for name in ("app", "celery", "numpy", "pydantic", "torch", "vllm", "workers"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    return folder


def _outside(servers: contextlib.ExitStack, folder: Path) -> str:
    redis_url = servers.enter_context(start_valkey(folder / "redis"))
    broker_url = servers.enter_context(start_valkey(folder / "broker", durable=False))
    s3 = servers.enter_context(start_s3(folder / "s3"))
    keys = f'access_key = "{s3.access_key}"\nsecret_key = "{s3.secret_key}"'
    api = "[api]\npjwt_auth_enabled = true\ncompress_batches = true"
    return f'{api}\n[redis]\nurl = "{redis_url}"\nbroker_url = "{broker_url}"\n[store]\nurl = "{s3.url}"\n{keys}'


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    with stack.client() as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
