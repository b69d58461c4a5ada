from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

from ops.helm import __main__ as command
from ops.helm import chart
from tests.unit.ops.compose import COMPOSE, ROOT
from tests.unit.ops.helm.rendered import SETS, containers, manifest, manifests, values

TRAINER = values("cpu-demo")["baseModels"][0]["trainer"]
SECRET = re.compile("PASSWORD|KEY|AUTH|SECRET|USER|URL|HEADERS")


def test_there_are_values_for_a_cpu_one_gpu_eight_gpus_and_several_nodes():
    assert SETS == ["cpu-demo", "eight-gpus", "one-gpu", "several-nodes"]


@pytest.mark.parametrize("name", SETS)
def test_the_chart_is_clean_and_every_manifest_is_valid(name: str):
    assert chart.lint(values(name)) == []
    for one in manifests(name):
        chart.validate(one)


def test_the_command_finds_no_mistake_in_the_chart_and_one_in_a_broken_chart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(chart, "VALUES", chart.VALUES[:1])
    assert command.main() == 0
    broken = tmp_path / "tinsmith"
    shutil.copytree(chart.CHART, broken)
    template = broken / "templates" / "api.yaml"
    template.write_text(template.read_text().replace("imagePullPolicy:", "imagePullPolcy:"))
    monkeypatch.setattr(chart, "CHART", broken)
    assert command.main() == 1
    assert "imagePullPolcy" in capsys.readouterr().err
    template.write_text(template.read_text().replace("{{- end }}", "", 1))
    assert command.main() > 0


def _container(one: dict[str, Any]) -> dict[str, Any]:
    return next(iter(chart.containers(one)))


@pytest.mark.parametrize(
    ("name", "kind", "ending", "spoil"),
    [
        ("cpu-demo", "Deployment", "-api", lambda one: one["spec"].update(replicas="two")),
        ("cpu-demo", "Deployment", "-api", lambda one: _container(one).update(imagePullPolcy="Always")),
        ("cpu-demo", "StatefulSet", "-valkey", lambda one: one["spec"].pop("selector")),
        ("cpu-demo", "NetworkPolicy", "-all", lambda one: one["spec"].update(policyTypes="Ingress")),
        ("cpu-demo", "PodDisruptionBudget", "-api", lambda one: one["spec"].update(maxUnavailble=1)),
        ("eight-gpus", "HorizontalPodAutoscaler", "-api", lambda one: one["spec"].pop("maxReplicas")),
        ("eight-gpus", "ScaledObject", "-trainer-qwen3-32b", lambda one: one["spec"].update(minReplicas=0)),
        ("eight-gpus", "ScaledObject", "-trainer-qwen3-32b", lambda one: one["spec"]["scaleTargetRef"].pop("name")),
        ("eight-gpus", "ServiceMonitor", "-metrics", lambda one: one["spec"]["endpoints"][0].update(interval="soon")),
        (
            "several-nodes",
            "LeaderWorkerSet",
            "-trainer-qwen3-235b",
            lambda one: one["spec"]["leaderWorkerTemplate"].update(restartPolicy="Never"),
        ),
        ("several-nodes", "LeaderWorkerSet", "-trainer-qwen3-235b", lambda one: _container(one).update(ports="all")),
    ],
)
def test_a_broken_manifest_is_caught_by_the_same_check(
    name: str, kind: str, ending: str, spoil: Callable[[dict[str, Any]], object]
):
    broken = manifest(name, kind, ending)
    spoil(broken)
    with pytest.raises(jsonschema.ValidationError):
        chart.validate(broken)


def _with(path: str, value: Any, name: str = "cpu-demo") -> dict[str, Any]:
    """A set of values with another value at a path."""
    found = values(name)
    *parents, last = path.split(".")
    place: Any = found
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
    place[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("secret", "", "secret"),
        ("baseModels", [], "baseModels"),
        ("baseModels.0.id", "Qwen/Qwen3", "id"),
        ("baseModels.0.trianer", {}, "trianer"),
        ("baseModels.0.trainer.replicas", "two", "replicas"),
        ("baseModels.0.trainer.nodes", 2, "gpus"),
        ("baseModels.0.sampler", {"nodes": 2, "gpus": 8, "resources": {"requests": {}, "limits": {}}}, "nodes"),
        ("baseModels.0.trainer.resources", {}, "requests"),
        ("baseModels.0.trainer.ageSeconds", 120, "maxReplicas"),
        ("baseModels.0.trainer", {**TRAINER, "ageSeconds": 120, "maxReplicas": 1}, "maxReplicas"),
        ("valkey.maxmemory", "2 GB", "maxmemory"),
        ("handover.hostPath", "dev/shm", "hostPath"),
        ("minio.bundled", False, "store"),
        ("settings.redis", {"url": "redis://:hush@redis"}, "redis"),
        ("api.replica", 3, "replica"),
    ],
)
def test_wrong_values_are_refused_by_name(path: str, value: Any, said: str):
    wrong = _with(path, value)
    with pytest.raises(helm_python.HelmError, match=said):
        chart.render(wrong)
    assert chart.lint(wrong) != []


def asleep(**workers: dict[str, Any]) -> dict[str, Any]:
    """The base model of cpu-demo, with a sampler that sleeps and further values of its workers."""
    base = values("cpu-demo")["baseModels"][0]
    base["sampler"]["settings"] = {"sleep": True}
    for section, further in workers.items():
        base[section] |= further
    return base


def named_alike(*sections: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Base models by id, with one worker each."""
    return [
        {"name": id_, "id": id_, "path": "/models/a", section: {**TRAINER, **further}}
        for id_, section, further in sections
    ]


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("several-nodes", "ssh.secret", "", "ssh.secret"),
        ("several-nodes", "data.claim", "", "data.claim"),
        ("several-nodes", "networkPolicy.egress", [], "networkPolicy.egress"),
        ("cpu-demo", "store.url", "https://s3.example.org/tinsmith", "set minio.bundled to false"),
        ("cpu-demo", "baseModels", values("cpu-demo")["baseModels"] * 2, "an id of its own"),
        (
            "cpu-demo",
            "baseModels.0.sampler.settings",
            {"sleep": True},
            "sampler.settings.sleep needs handover.hostPath",
        ),
        ("cpu-demo", "baseModels", [asleep(sampler={"replicas": 2})], "set replicas and maxReplicas of both to 1"),
        ("cpu-demo", "baseModels", [asleep(trainer={"replicas": 2})], "set replicas and maxReplicas of both to 1"),
        ("cpu-demo", "baseModels", [asleep(sampler={"maxReplicas": 2})], "set replicas and maxReplicas of both to 1"),
        ("cpu-demo", "baseModels.0.id", "a-name-of-four-and-twenty", "baseModels"),
        (
            "cpu-demo",
            "baseModels",
            named_alike(("a", "full_sampler", {}), ("sampler-a", "full", {})),
            "two objects would have the name full-sampler-a: choose another id",
        ),
        (
            "several-nodes",
            "baseModels",
            named_alike(("a", "trainer", {"nodes": 2, "gpus": 8}), ("a-metrics", "trainer", {})),
            "two objects would have the name trainer-a-metrics: choose another id",
        ),
        ("eight-gpus", "baseModels.0.trainer.minReplicas", 2, r"trainer-qwen3-32b: minReplicas \(2\) is above maxRep"),
        ("eight-gpus", "baseModels.0.sampler.minReplicas", 3, r"minReplicas \(3\) is above maxReplicas \(2\)"),
        ("eight-gpus", "api.maxReplicas", 1, r"api: minReplicas \(2\) is above maxReplicas \(1\)"),
        ("cpu-demo", "valkey.maxmemory", "4gb", r"valkey: maxmemory \(4gb\) must be below the memory limit \(4Gi\)"),
        ("cpu-demo", "broker.maxmemory", "600mb", r"broker: maxmemory \(600mb\) must be below the memory limit"),
        ("cpu-demo", "valkey.resources.limits.memory", 2 * 10**9, r"must be below the memory limit \(2000000000\)"),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_the_remedy(name: str, path: str, value: Any, said: str):
    with pytest.raises(helm_python.HelmError, match=said):
        chart.render(_with(path, value, name))


@pytest.mark.parametrize("limit", ["2049Mi", "2.5G", 3 * 10**9, "3e9", "1T"])
def test_a_memory_limit_above_the_servers_maxmemory_is_taken_in_each_notation(limit: str | int):
    assert chart.render(_with("valkey.resources.limits.memory", limit))


def test_a_release_whose_objects_would_have_too_long_names_is_refused():
    with helm_python.Chart.load(chart.CHART) as one, pytest.raises(helm_python.HelmError, match="shorter name"):
        one.render(values("cpu-demo"), name="r" * 40, namespace="ml")


@pytest.mark.parametrize("name", SETS)
def test_no_secret_has_a_default_or_a_value_in_the_chart(name: str):
    assert not manifests(name, "Secret")
    for workload, container in containers(name):
        for one in container.get("env", []):
            if not SECRET.search(one["name"]):
                continue
            reference = one.get("valueFrom", {}).get("secretKeyRef", {})
            assert reference.get("name") == values(name)["secret"] or ":$(VALKEY_PASSWORD)@" in one["value"], workload
            # Without these, no answers are kept, nobody is an operator, and a collector needs no key.
            optional = ("TINSMITH_CAPTURE_SECRET", "TINSMITH_OPERATOR_KEY", "OTEL_EXPORTER_OTLP_HEADERS")
            assert bool(reference.get("optional")) == (one["name"] in optional)
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert (defaults["secret"], defaults["ssh"]["secret"]) == ("", "")
    for one in manifests(name, "ConfigMap"):
        assert not re.search("hush|password|secret_key|access_key|api_keys", str(one["data"])), one["metadata"]["name"]


def test_only_the_api_has_the_keys_of_clients_and_members_of_a_group_have_no_secret_but_their_ssh_keys():
    for name in SETS:
        for workload, container in containers(name):
            names = {one["name"] for one in container.get("env", [])}
            for key in ("TINSMITH_API_KEY", "TINSMITH_OPERATOR_KEY"):
                assert (key in names) == (workload == "tinsmith-api"), workload
            assert container["name"] != "member" or not names


@pytest.mark.parametrize("name", SETS)
def test_every_container_has_probes_resources_and_no_privileges(name: str):
    for workload, container in containers(name):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert {"httpGet", "exec", "tcpSocket"} & container[probe].keys(), (workload, probe)
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), workload
        assert "memory" in resources["limits"], workload
        security = container["securityContext"]
        assert security == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, workload
    for one in manifests(name):
        for pod in chart.pods(one):
            spec = pod["spec"]
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("name", SETS)
def test_every_mount_has_a_volume_and_every_volume_is_mounted(name: str):
    for one in manifests(name):
        claimed = {claim["metadata"]["name"] for claim in one.get("spec", {}).get("volumeClaimTemplates", [])}
        for pod in chart.pods(one):
            volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | claimed
            mounts = [mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
            assert {mount["name"] for mount in mounts} == volumes, one["metadata"]["name"]


def test_versions_are_those_of_the_project_and_of_its_compose_file():
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert about["version"] == about["appVersion"] == defaults["image"]["tag"] == version
    assert defaults["valkey"]["image"] == services["redis"]["image"]
    assert defaults["minio"]["image"] == services["minio"]["image"]
    for image in ("api", "worker"):
        built = services[{"api": "api", "worker": "trainer"}[image]]["image"]
        assert f"{defaults['image'][image]}:{version}" == built


@pytest.mark.parametrize("name", SETS)
def test_every_pod_is_shut_off_from_everybody_but_those_that_a_rule_names(name: str):
    (everything,) = [one for one in manifests(name, "NetworkPolicy") if one["metadata"]["name"].endswith("-all")]
    assert everything["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in everything["spec"]
    (names,) = [
        rule for rule in everything["spec"]["egress"] if {"port": 53, "protocol": "UDP"} in rule.get("ports", [])
    ]
    # The address of a cache of DNS on the node belongs to no pod.
    assert names["to"] == [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "169.254.0.0/16"}}]
    ours = everything["spec"]["podSelector"]["matchLabels"]
    for one in manifests(name):
        for pod in chart.pods(one):
            assert ours.items() <= pod["metadata"]["labels"].items(), one["metadata"]["name"]
    for one in manifests(name, "NetworkPolicy"):
        public = one["metadata"]["name"].endswith(("-api", "-downloads"))
        assert public or all(rule["from"] for rule in one["spec"].get("ingress", [])), one["metadata"]["name"]


@pytest.mark.parametrize("name", SETS)
def test_without_scrapers_only_the_ranks_of_a_group_reach_workers(name: str):
    rendered = chart.render(_with("networkPolicy.scrapers", [], name))
    workers = {pod["metadata"]["labels"].get("tinsmith/workers") for one in rendered for pod in chart.pods(one)}
    for one in rendered:
        selector = one["spec"]["podSelector"]["matchLabels"] if one["kind"] == "NetworkPolicy" else {}
        if "tinsmith/workers" in selector:
            chart.validate(one)
            workers.remove(selector["tinsmith/workers"])
            assert "Ingress" in one["spec"]["policyTypes"]
            peers = [rule["from"] for rule in one["spec"]["ingress"]]
            assert all(peer == [{"podSelector": {"matchLabels": selector}}] for peer in peers)
    assert workers == {None}


def test_the_alerts_of_processes_that_are_down_ask_for_the_job_and_the_ports_of_the_servicemonitor():
    alerts = yaml.safe_load((ROOT / "ops" / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    expressions = {alert["alert"]: alert["expr"] for alert in alerts}
    asked = {
        name: re.search(r'job="(\w+)",endpoint(!?=)"(\w+)"', expressions[name])
        for name in ("TinsmithDown", "TinsmithWorkerDown")
    }
    monitor = manifest("eight-gpus", "ServiceMonitor", "-metrics")["spec"]
    ports = {endpoint["port"] for endpoint in monitor["endpoints"]}
    found = [
        (name, port["name"])
        for one in manifests("eight-gpus", "Service")
        if monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        for port in one["spec"]["ports"]
        if port["name"] in ports
        for name, match in asked.items()
        if match
        and match[1] == one["metadata"]["labels"][monitor["jobLabel"]]
        and (match[3] == port["name"]) is (match[2] == "=")
    ]
    assert sorted(found) == [("TinsmithDown", "http"), *[("TinsmithWorkerDown", "metrics")] * 2]


@pytest.mark.parametrize("name", SETS)
def test_every_service_and_policy_selects_pods_and_names_their_ports(name: str):
    every = [pod for one in manifests(name) for pod in chart.pods(one)]
    for one in [
        *manifests(name, "Service"),
        *manifests(name, "NetworkPolicy"),
        *manifests(name, "PodDisruptionBudget"),
    ]:
        spec = one["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        labels = selector.get("matchLabels", selector)
        selected = [pod for pod in every if labels.items() <= pod["metadata"]["labels"].items()]
        assert selected, one["metadata"]["name"]
        listening = [port for pod in selected for each in pod["spec"]["containers"] for port in each["ports"]]
        names = {port["name"] for port in listening}
        assert {port["targetPort"] for port in spec.get("ports", [])} <= names
        admitted = {port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])}
        assert admitted <= names | {port["containerPort"] for port in listening}
