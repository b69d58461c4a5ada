"""A stack on a disk that fills up: clients wait, and the state server lives.

The disk is a tmpfs in a mount namespace, which needs no privileges beside user namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from tinker.proto import tinker_public_pb2 as sdk

from app import settings
from app.stores.redis.client import connect
from tests.contract.data import train
from tests.contract.stack import API_KEY, BASE, Stack, running
from tests.models import tiny_qwen3
from tests.servers import free_port
from tests.unit.app.conftest import batch

MIB = 2**20
SIZE, LEAST_FREE = 160 * MIB, 48 * MIB
# What calls add before they are refused, at most: one watches twice a second.
SLACK = 40 * MIB
MOST_CALLS, MOST_REFUSED = 120, 20


class SmallDisk:
    """The tmpfs as seen from here, through the stack's own root folder."""

    def __init__(self, stack: Stack) -> None:
        assert stack.process is not None
        self.folder = Path(f"/proc/{stack.process.pid}/root{stack.data_dir}")

    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, free: int) -> None:
        """Leaves so many bytes free."""
        with (self.folder / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free() - free)

    def clear(self) -> None:
        (self.folder / "filler").unlink()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    data = tmp_path / "data"
    data.mkdir()
    mount = f'mount -t tmpfs -o size={SIZE} none "{data}" && exec "$@"'
    stack = Stack(
        data,
        tiny_qwen3(tmp_path / "model"),
        free_port(),
        trainer='backend = "torch"',
        extra=f"[engine]\nfree_disk_bytes = {LEAST_FREE}",
        program="tests.warm_workers",
        wrapper=("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", mount, "sh"),
    )
    with running(stack):
        yield stack


def test_a_disk_that_fills_up_is_a_503_and_ends_nothing(stack: Stack):
    disk = SmallDisk(stack)
    url = settings.load(disk.folder / "run" / "settings.toml").redis.url
    with stack.client() as service, connect(url) as server:
        client = service.create_lora_training_client(base_model=BASE, rank=4).result()
        losses = train(client, 1)
        first = server.info("server")["process_id"]
        disk.fill(LEAST_FREE + 8 * MIB)
        answers = fill_with_calls(stack, client.model_id)
        refused = next(answer for answer in answers if answer.status_code != 200)
        assert refused.status_code == 503
        assert "engine.free_disk_bytes" in refused.json()["detail"]
        assert float(refused.headers["Retry-After"]) > 0
        assert answers[-1].status_code == 503
        assert post(stack, large(client.model_id, 10)).status_code == 200, "a call that was taken before"
        assert server.info("server")["process_id"] == first, "the state server lives"
        assert disk.free() > LEAST_FREE - SLACK
        disk.clear()
        other = service.create_lora_training_client(base_model=BASE, rank=4).result()
        assert train(other, 1) == losses


def fill_with_calls(stack: Stack, model: str) -> list[requests.Response]:
    """Sends calls until some are refused. They wait for a seq that is never sent, so they only fill the disk."""
    answers: list[requests.Response] = []
    for seq in range(10, 10 + MOST_CALLS):
        answers.append(post(stack, large(model, seq)))
        if sum(answer.status_code != 200 for answer in answers) == MOST_REFUSED:
            break
    return answers


def large(model: str, seq: int) -> sdk.ForwardBackwardRequest:
    """A call of about 1.5 MiB."""
    message = batch(model, seq, tokens=[1 + seq] * 32, target_tokens=[2] * 32)
    for _ in range(4095):
        message.data.add().CopyFrom(message.data[0])
    return message


def post(stack: Stack, message: sdk.ForwardBackwardRequest) -> requests.Response:
    headers = {"X-API-Key": API_KEY, "Content-Type": "application/x-protobuf"}
    url = f"{stack.url}/api/v1/forward_backward"
    return requests.post(url, data=message.SerializeToString(), headers=headers, timeout=120)
