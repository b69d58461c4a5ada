"""Ports that are free, and workers that keep the ports of their metrics, each its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app.errors import SetupError
from app.settings import METRICS_PORT_VARIABLE, Settings
from app.stack.child import Command
from app.stack.ports import free_port, metrics_urls, with_metrics_ports
from app.stack.up import process_table

WORKERS = {"trainer": {"count": 2}, "sampler": {"count": 2, "metrics_port": 9105}, "full": {"hostfile": "hosts"}}


def commands(**sections: object) -> list[Command]:
    base = {"name": "base", "path": "org/base", **(sections or WORKERS)}
    return list(process_table(Settings.model_validate({"base_models": [base]}), Path("settings.toml")))


def ports(found: list[Command]) -> dict[str, int]:
    return {one.name: int(one.environ.get(METRICS_PORT_VARIABLE, -1)) for one in found}


def test_a_busy_port_is_named_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use.*--port"):
            free_port("127.0.0.1", port)


def test_a_host_that_is_not_of_this_machine_is_named_as_the_fault():
    with pytest.raises(SetupError, match=r"cannot listen on nohost.invalid:0: .*; choose an address .* --host"):
        free_port("nohost.invalid", 0)


def test_port_0_becomes_a_port_that_can_be_listened_on():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1", 0))) as server:
        assert server.getsockname()[1] > 0


def test_each_worker_keeps_its_own_port(tmp_path: Path):
    file = tmp_path / "ports.json"
    found = ports(with_metrics_ports(commands(), file, {1}))
    assert found["api"] == -1, "it has its metrics on its own port"
    own = {found["trainer-0"], found["trainer-1"]}
    assert len(own) == 2 and min(own) > 1024
    assert ports(with_metrics_ports(commands(), file, {1})) == found
    fewer = commands(trainer={"count": 1}, sampler={"count": 0})
    assert ports(with_metrics_ports(fewer, file, {1}))["trainer-0"] == found["trainer-0"]
    assert ports(with_metrics_ports(commands(), file, {1})) == found, "one that did not run keeps it too"


def test_configured_ports_are_counted_up_and_those_on_another_host_are_not_chosen_here(tmp_path: Path):
    done = with_metrics_ports(commands(), tmp_path / "ports.json", ())
    found = ports(done)
    assert (found["sampler-0"], found["sampler-1"], found["full-trainer-0"]) == (9105, 9106, 0)
    assert metrics_urls(done) == {
        name: f"http://127.0.0.1:{found[name]}/metrics" for name in ("trainer-0", "trainer-1", "sampler-0", "sampler-1")
    }


def test_a_port_that_another_process_or_setting_uses_is_replaced(tmp_path: Path):
    file = tmp_path / "ports.json"
    before = ports(with_metrics_ports(commands(), file, ()))
    after = ports(with_metrics_ports(commands(), file, {before["trainer-0"]}))
    assert after["trainer-0"] != before["trainer-0"] and after["trainer-1"] == before["trainer-1"]
    with socket.create_server(("127.0.0.1", after["trainer-0"])):
        assert ports(with_metrics_ports(commands(), file, ()))["trainer-0"] not in (0, after["trainer-0"])
    configured = free_port("127.0.0.1", 0)
    file.write_text(f'{{"trainer-0": {configured}}}')
    sections = {"trainer": {}, "sampler": {"metrics_port": configured}}
    found = ports(with_metrics_ports(commands(**sections), file, ()))
    assert found["sampler-0"] == configured != found["trainer-0"]


def test_two_workers_never_have_one_port(tmp_path: Path):
    port = free_port("127.0.0.1", 0)
    (tmp_path / "ports.json").write_text(f'{{"trainer-0": {port}, "trainer-1": {port}}}')
    found = ports(with_metrics_ports(commands(), tmp_path / "ports.json", ()))
    assert found["trainer-0"] == port != found["trainer-1"]
