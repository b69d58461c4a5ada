"""A rank group on the hosts of a hostfile, under `tinsmith up`: two hosts, each with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

from tests.contract.data import ADAM, logprobs, supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import children, is_gone, undisturbed
from tests.hosts import FIRST, SECOND, install_ssh, write_hostfile
from tests.servers import free_port


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hosts")
    hostfile = write_hostfile(folder / "hostfile")
    trainer = f'backend = "deepspeed"\nranks = 2\nhostfile = "{hostfile}"'
    sampler, engine, program = 'backend = "transformers"', "[engine]\nlease_s = 3.0", "tests.warm_workers"
    stack = Stack(folder / "data", base_path, free_port(), trainer, sampler, engine, program, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        install_ssh(folder / "bin", patch)
        with running(stack):
            yield stack


@pytest.fixture
def service(hosts: Stack) -> Iterator[tinker.ServiceClient]:
    with hosts.client() as client:
        yield client


def ranks(stack: Stack) -> dict[str, psutil.Process]:
    """Ranks by host.

    Celery writes its title over rank 0's environment, so the host is read from its parent process.
    """
    launchers = children(stack, "-m deepspeed.launcher.launch")
    return {launcher.environ()["SSH_CONNECTION"]: rank for launcher in launchers for rank in launcher.children()}


def test_each_host_has_a_rank_and_no_secret_is_in_its_environment_or_command_line(hosts: Stack) -> None:
    found = ranks(hosts)
    assert found.keys() == {FIRST, SECOND}
    [trainer] = [worker for worker in hosts.workers() if worker.role == "trainer"]
    assert trainer.describe["ranks"] == 2
    redis_url = hosts.settings().redis.url
    for process in [*found.values(), *(rank.parent() for rank in found.values())]:
        assert redis_url not in " ".join([*process.cmdline(), *process.environ().values()])
    assert found[SECOND].environ()["OMP_NUM_THREADS"] == "1", "what the other host must know too"


def test_a_host_that_dies_takes_the_group_down_and_the_next_start_goes_on_to_the_same_bits(
    hosts: Stack, service: tinker.ServiceClient
) -> None:
    expected = undisturbed(service, 4)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 2)
    before = ranks(hosts)
    before[SECOND].suspend()
    pending = [(client.forward_backward(supervised(), "cross_entropy"), client.optim_step(ADAM)) for _ in range(2)]
    before[SECOND].kill()
    assert all(forward.result() and step.result() for forward, step in pending)
    assert is_gone(before[FIRST])
    assert np.array_equal(logprobs(client.forward(supervised(seed=8), "cross_entropy").result()), expected)
