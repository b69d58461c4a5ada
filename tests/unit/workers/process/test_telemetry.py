"""Reported service time of a call, for calls that run alone, together and after a pause; the port of the metrics."""

from __future__ import annotations

import urllib.request

import pytest

from app.errors import SetupError
from tests.servers import free_port
from workers.process.telemetry import ServiceTime, serve_metrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service_time(clock: Clock) -> ServiceTime:
    return ServiceTime(clock)


def test_nothing_is_known_before_the_first(service_time: ServiceTime) -> None:
    assert service_time.seconds() == 0


def test_calls_one_after_the_other_take_what_each_takes(service_time: ServiceTime, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 2
        service_time.ended(2.0)
    assert service_time.seconds() == pytest.approx(2)


def test_calls_of_one_pass_share_its_time(service_time: ServiceTime, clock: Clock) -> None:
    for _ in range(200):
        clock.now += 2
        for _ in range(4):
            service_time.ended(2.0)
    assert service_time.seconds() == pytest.approx(0.5, rel=0.05)


def test_a_pause_is_no_work(service_time: ServiceTime, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 3600
        service_time.ended(2.0)
    assert service_time.seconds() == pytest.approx(2)


def test_the_last_calls_count_more_than_those_long_ago(service_time: ServiceTime, clock: Clock) -> None:
    for seconds in (*[1.0] * 500, *[3.0] * 50):
        clock.now += seconds
        service_time.ended(seconds)
    assert 2 < service_time.seconds() < 3


def answers(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return b"tinsmith_ops_total" in answer.read()


def test_metrics_are_on_the_port_that_the_worker_was_given() -> None:
    port = free_port()
    url = serve_metrics(0, {"TINSMITH_METRICS_PORT": str(port)})
    assert url == f"http://127.0.0.1:{port}/metrics" and answers(url)
    other = serve_metrics(0, {"TINSMITH_METRICS_PORT": str(port)})
    assert other != url and answers(other), "a port that is taken ends no worker"


def test_a_port_of_the_settings_is_served_on_every_interface_or_not_at_all() -> None:
    port = free_port()
    assert answers(serve_metrics(port, {}).replace("127.0.0.1", "127.0.0.2"))
    with pytest.raises(
        SetupError, match=f"cannot serve metrics on port {port}: Address already in use; stop the process"
    ):
        serve_metrics(port, {})
    copy = free_port()
    assert f":{copy}/" in serve_metrics(port, {"TINSMITH_METRICS_PORT": str(copy)})


def test_a_chosen_port_is_reached_from_this_machine_alone() -> None:
    url = serve_metrics(0, {})
    with pytest.raises(OSError):
        answers(url.replace("127.0.0.1", "127.0.0.2"))
