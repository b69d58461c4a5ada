from __future__ import annotations

import errno
import os
import socket
import subprocess

import psutil
import pytest
import torch

from app.errors import SetupError
from tests.servers import free_port
from workers.backends.training import ranks
from workers.backends.training.ranks import RankGroup, Shards, default_environment, total_norms

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def test_a_lone_process_is_a_group_of_one_and_its_children_are_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with default_environment():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert [name for name in NAMES if name in os.environ] == ["LOCAL_RANK"]


def test_a_launchers_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "1")
    with default_environment():
        assert os.environ["WORLD_SIZE"] == "1"
    assert os.environ["RANK"] == "1"


@pytest.fixture
def first_host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of a group over two hosts."""
    place = {"RANK": "0", "CROSS_RANK": "0", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")
    return monkeypatch


def reaches(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, int(os.environ["MASTER_PORT"]))) == 0


@pytest.mark.usefixtures("first_host")
def test_the_store_of_several_hosts_listens_on_the_first_ones_address_only() -> None:
    store = ranks.serve_hosts()
    assert store is not None
    assert reaches("127.0.0.2") and not reaches("127.0.0.1")


def test_the_store_of_several_hosts_listens_on_a_chosen_interface(first_host: pytest.MonkeyPatch) -> None:
    first_host.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    store = ranks.serve_hosts()
    assert store is not None
    assert reaches("127.0.0.1") and not reaches("127.0.0.2")
    assert os.environ["MASTER_ADDR"] == "127.0.0.1", "the other ranks of this host reach it there"


def test_a_rank_of_another_host_serves_nothing_and_goes_by_the_hostfile(first_host: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("CROSS_RANK", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        first_host.setenv(name, value)
    assert ranks.serve_hosts() is None
    assert os.environ["MASTER_ADDR"] == "127.0.0.2"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MASTER_ADDR", "192.0.2.1", "rank 0 cannot listen on 192.0.2.1 .* GLOO_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAME", "none9", "GLOO_SOCKET_IFNAME is 'none9', but this machine has no such interface"),
    ],
)
def test_an_address_that_is_not_here_is_a_setup_error(
    first_host: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    first_host.setenv(name, value)
    with pytest.raises(SetupError, match=why):
        ranks.serve_hosts()


def test_a_rank_is_lost_as_soon_as_its_process_has_ended_whoever_waits_for_it() -> None:
    with subprocess.Popen(["sleep", "600"]) as ended, subprocess.Popen(["sleep", "600"]) as alive:
        group = RankGroup(0, 3, siblings=(psutil.Process(alive.pid), psutil.Process(ended.pid)))
        try:
            assert not group.lost_one()
            ended.kill()
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
            assert group.lost_one(), "its launcher has not seen it yet"
            ended.wait()
            assert group.lost_one()
        finally:
            alive.kill()
            ended.kill()


def test_a_rank_that_cannot_be_looked_for_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: psutil.Process) -> str:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(psutil.Process, "status", fail)
    assert not RankGroup(0, 2, siblings=(psutil.Process(os.getpid()),)).lost_one()


def test_the_norm_of_a_large_tensor_is_exact_on_a_cpu() -> None:
    """One sum over its 5 million elements is off by 1e-4."""
    tensor = torch.randn(80_000, 64, generator=torch.Generator().manual_seed(0))
    shards = Shards.of({"a": tensor.numel()}, RankGroup(), torch.device("cpu"), split=False)
    (norm,) = total_norms([(shards, {"a": tensor})])
    assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=1e-6)


@pytest.mark.parametrize(("split", "owners"), [(True, 1), (False, 2)])
def test_each_tensor_has_one_owner_if_they_are_split_and_else_every_rank(split: bool, owners: int) -> None:
    sizes = {"a": 4, "b": 4, "c": 2}
    ranks_ = [Shards.of(sizes, RankGroup(rank, 2), torch.device("cpu"), split=split) for rank in range(2)]
    assert {name: sum(shards.owns(name) for shards in ranks_) for name in sizes} == dict.fromkeys(sizes, owners)
