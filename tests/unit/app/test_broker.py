"""The options behind the broker's URL, as Celery and redis-py's clients take them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu.utils.url import parse_url

from app.dispatch import App, Dispatcher, TickSender, celery_app
from app.errors import SetupError
from app.settings import RedisSettings, Settings
from app.stores.redis.client import connect
from app.stores.redis.types import Holder
from tests.servers import start_valkey
from tests.tls import tls_in_front, write_certificate


def of(tmp_path: Path, **urls: str) -> App:
    return celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(**urls)))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.mark.parametrize(
    "options", ["health_check_interval=30", "socket_timeout=5", "protocol=3", "client_name=ours&protocol=2", "db=3"]
)
def test_under_options_of_redis_py_messages_arrive_where_workers_count_them(url: str, options: str, tmp_path: Path):
    for urls in ({"url": f"{url}?{options}"}, {"url": url, "broker_url": f"{url}?{options}"}):
        celery = of(tmp_path, **urls)
        ticks, queue = TickSender(celery, "train.base@a"), "train.base@a"
        with connect(celery.redis_url) as broker:
            broker.delete(queue)
        Dispatcher(celery).send("forward", "session:train:0:1", "session:train:0", queue)
        assert ticks.waiting() == 1
        Dispatcher(celery).wake(Holder("base", "a"))
        assert ticks.send()
        assert ticks.waiting() == 2


def test_the_dashboard_shows_the_settings_of_a_worker_under_options_of_redis_py(tmp_path: Path):
    """Flower asks for them, and Celery then reads the broker's URL to hide the password."""
    shown = of(tmp_path, url="redis://:secret@a:1/0?socket_timeout=5").conf.humanize(with_defaults=False)
    assert "@a:1/1" in shown and "secret" not in shown


def test_celery_finds_the_server_that_the_options_name(tmp_path: Path):
    celery = of(tmp_path, broker_url="redis://[::1]:6380?db=3&username=me&password=p%40ss&socket_timeout=5")
    found = parse_url(celery.conf.broker_url)
    shown = ("hostname", "port", "userid", "password", "virtual_host")
    assert [found[name] for name in shown] == ["::1", 6380, "me", "p@ss", "3"]
    assert len(found) == len(shown) + 1


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("", {}),
        ("?ssl_ca_certs=/ca.pem", {"ssl_ca_certs": "/ca.pem"}),
        ("?ssl_cert_reqs=none", {"ssl_cert_reqs": "none"}),
        ("?ssl_cert_reqs=optional&ssl_cert_reqs=none", {"ssl_cert_reqs": "optional"}),
        *((f"?ssl_check_hostname={text}", {"ssl_check_hostname": False}) for text in ("no", "0", "n", "False")),
        ("?ssl_check_hostname=yes", {"ssl_check_hostname": True}),
        ("?ssl_min_version=771&socket_timeout=5", {"ssl_min_version": 771}),
    ],
)
def test_celery_and_the_dashboard_get_the_tls_options_of_the_url_as_redis_py_reads_them(
    query: str, options: dict[str, object], tmp_path: Path
):
    """Flower reads them from Celery's settings alone."""
    celery = of(tmp_path, url=f"rediss://a:1/0{query}")
    wanted = {"ssl_cert_reqs": "required", **options}
    assert celery.conf.broker_use_ssl == wanted
    with celery.connection_for_write() as connection:
        assert connection.ssl == wanted


def test_over_tls_a_certificate_with_another_name_is_taken_where_the_url_says_so(url: str, tmp_path: Path):
    certificate, queue = write_certificate(tmp_path), "train.base@tls"
    with tls_in_front(int(url.rpartition(":")[2].partition("/")[0]), certificate) as (port, _):
        # kombu would give both the same connections if their databases were one.
        checked, unchecked = (f"rediss://localhost:{port}/{db}?ssl_ca_certs={certificate}" for db in range(2))
        assert not TickSender(of(tmp_path, broker_url=checked), queue).send()
        celery = of(tmp_path, broker_url=f"{unchecked}&ssl_check_hostname=no")
        Dispatcher(celery).wake(Holder("base", "tls"))
        assert TickSender(celery, queue).waiting() == 1


@pytest.mark.parametrize("found", ["REQUIRED", "CERT_NONE", "no"])
def test_a_check_of_certificates_that_redis_py_does_not_know_is_refused_at_the_start(found: str, tmp_path: Path):
    with pytest.raises(SetupError, match=f"ssl_cert_reqs={found}; write required, optional or none"):
        of(tmp_path, url=f"rediss://a:1/0?ssl_cert_reqs={found}")


def test_a_value_that_redis_py_cannot_read_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(SetupError, match="the broker's URL: Invalid value for 'socket_timeout'"):
        of(tmp_path, url="redis://a:1/0?socket_timeout=long")


def test_a_broker_without_tls_gets_no_tls_options(tmp_path: Path):
    assert not of(tmp_path, url="redis://a:1/0").conf.broker_use_ssl
    assert not of(tmp_path, url="redis://a:1/0?ssl_check_hostname=no").conf.broker_use_ssl
