"""Each query of the dashboard returns data in a real Prometheus that scrapes a stack which trains, samples and loses a
worker. `make dashboards` runs these tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from app.stores.redis.journal import RedisOpLog
from ops.grafana.panels import ROWS, Graph
from tests.contract.data import supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import await_true, children
from tests.dashboards.prometheus import Prometheus, scraping
from tests.models import tiny_qwen3
from tests.servers import free_port
from tests.unit.ops.test_alerts import ALERTS, PROMETHEUS

PROGRAM = os.environ.get("TINSMITH_PROMETHEUS") or shutil.which("prometheus")
SMI = "#!/bin/sh\necho 0, GPU-a, 1024, 81559, 50\n"
# No call kills three workers here.
QUIET = "tinsmith_given_up_ops_total"
GRAPHS = [graph for graphs in ROWS.values() for graph in graphs]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack on a machine with an nvidia-smi, if only a stand-in."""
    base, tools = tiny_qwen3(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("tools")
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("nvidia-smi") is None:
            (tools / "nvidia-smi").write_text(SMI)
            (tools / "nvidia-smi").chmod(0o755)
            patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        with running(Stack(tmp_path_factory.mktemp("stack") / "data", base, free_port())) as stack:
            yield stack


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    assert PROGRAM, "install Prometheus (Debian: apt install prometheus), or name it in TINSMITH_PROMETHEUS"
    urls = [stack.url, *(worker.metrics_url for worker in stack.workers())]
    with scraping(PROGRAM, tmp_path_factory.mktemp("prometheus"), urls, PROMETHEUS / "alerts.yml") as found:
        with stack.client() as service:
            work(service, stack)
        found.scrape_all(len(urls))
        yield found


def work(service: tinker.ServiceClient, stack: Stack) -> None:
    """Trains and samples, has a call refused, and kills the trainer once while it works."""
    training = service.create_lora_training_client(BASE, rank=4).result()
    train(training, 30)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(range(3, 40)))
    for _ in range(20):
        sampler.sample(prompt, 2, types.SamplingParams(max_tokens=20)).result()
    rest = tinker.RestClient(base_url=stack.url, api_key=stack.api_key)
    with pytest.raises(tinker.APIStatusError):
        rest.get_training_run("none:train:0").result()
    pending = [training.forward_backward(supervised(200), "cross_entropy") for _ in range(8)]
    kill_trainer_at_work(stack)
    assert all(one.result() for one in pending)
    train(training, 30)


def kill_trainer_at_work(stack: Stack) -> None:
    [trainer] = children(stack, "--name trainer")
    with stack.redis() as client:
        oplog = RedisOpLog(client, stack.settings().engine)
        await_true(lambda: any(one.running for one in oplog.pending()))
        trainer.kill()


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.title)
def test_each_query_of_a_graph_returns_data(prometheus: Prometheus, graph: Graph):
    for query in graph.queries:
        asked = query.expr if QUIET in query.expr else query.expr.removesuffix(" or vector(0)")
        assert prometheus.series(asked.replace("$__rate_interval", "5s")), asked


def test_prometheus_evaluates_each_alert(prometheus: Prometheus):
    assert prometheus.alerts() == ALERTS.keys()
