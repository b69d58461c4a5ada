"""Each query of the dashboard returns data in a real Prometheus that scrapes a stack which trains, saves, samples and
loses a worker. `make dashboards` runs these tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
import tinker
from tinker import types

from app.stores.redis.journal import RedisOpLog
from ops.grafana.panels import ROWS, Graph, Query
from tests.contract.data import supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import await_true, children
from tests.dashboards.prometheus import Prometheus, Series, scraping
from tests.models import tiny_qwen3
from tests.servers import free_port
from tests.unit.ops.test_alerts import ALERTS, PROMETHEUS

PROGRAM = os.environ.get("TINSMITH_PROMETHEUS") or shutil.which("prometheus")
SMI = "#!/bin/sh\necho 0, GPU-a, 1024, 81559, 50\n"
# What does not happen here, so 0 is enough: no call kills three workers, no worker loses its model to another one, the
# object store stays, and transformers caches no prompts.
QUIET = (
    *("tinsmith_given_up_ops_total", "tinsmith_lost_leases_total", "tinsmith_refused_commits_total"),
    *("tinsmith_object_store_outages_total", 'tinsmith_tokens_total{use="cached"}'),
)
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
            work(service, stack, lambda: found.scrape_all(len(urls)))
        found.scrape_all(len(urls))
        yield found


def work(service: tinker.ServiceClient, stack: Stack, scrape: Callable[[], None]) -> None:
    """Trains, saves and samples, has a call refused, and kills the trainer once while it works."""
    for _ in range(2):  # a rate needs an event after the first scrape of a series
        training = service.create_lora_training_client(BASE, rank=4).result()
        train_and_sample(training)
        scrape()
    rest = tinker.RestClient(base_url=stack.url, api_key=stack.api_key)
    with pytest.raises(tinker.APIStatusError):
        rest.get_training_run("none:train:0").result()
    pending = [training.forward_backward(supervised(200), "cross_entropy") for _ in range(8)]
    pending[0].result()  # the next trainer runs it again
    kill_trainer_at_work(stack)
    assert all(one.result() for one in pending)
    train(training, 30)


def train_and_sample(training: tinker.TrainingClient) -> None:
    train(training, 15)
    training.save_state("state").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(range(3, 40)))
    for _ in range(20):
        sampler.sample(prompt, 2, types.SamplingParams(max_tokens=20)).result()


def kill_trainer_at_work(stack: Stack) -> None:
    [trainer] = children(stack, "--name trainer")
    with stack.redis() as client:
        oplog = RedisOpLog(client, stack.settings().engine)
        await_true(lambda: any(one.running for one in oplog.pending()))
        trainer.kill()


def is_quiet(query: Query) -> bool:
    return any(metric in query.expr for metric in QUIET)


def series(prometheus: Prometheus, query: Query) -> list[Series]:
    expr = query.expr if is_quiet(query) else query.expr.removesuffix(" or vector(0)")
    return prometheus.series(expr.replace("$__rate_interval", "5s"))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.title)
def test_each_query_of_a_graph_returns_data(prometheus: Prometheus, graph: Graph):
    for query in graph.queries:
        values = [value for one in series(prometheus, query) for value in one.values]
        assert values, query.expr
        counts_events = "[" in query.expr  # a gauge may be 0 at each scrape
        assert max(values) > 0 or not counts_events or is_quiet(query), query.expr


def test_a_call_is_shown_in_each_of_its_stages(prometheus: Prometheus):
    [query] = [query for graph in GRAPHS for query in graph.queries if query.legend == "{{stage}}"]
    assert {one.labels["stage"] for one in series(prometheus, query)} == {"wait", "run", "commit", "write"}


def test_prometheus_evaluates_each_alert(prometheus: Prometheus):
    assert prometheus.alerts() == ALERTS.keys()
