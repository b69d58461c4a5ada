"""The chart's workloads beside the code that they run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app import telemetry
from app.services.base_models import roles
from app.settings import load
from app.settings.gpus import gpus_of_copies
from app.stack import checks, placement
from app.stores.redis.types import Waiting
from ops.helm import chart
from tests.unit.ops.compose import ROOT
from tests.unit.ops.helm.rendered import SETS, containers, environment, manifest, manifests, settings, values
from workers import node
from workers.process import multinode, orderly_stop, runtime

WORKERS = ("StatefulSet", "LeaderWorkerSet")


def workers(name: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Each workload that runs a worker, with its pod and the worker's container."""
    found = []
    for kind in WORKERS:
        for one in manifests(name, kind):
            for pod in chart.pods(one):
                found += [(one, pod, each) for each in pod["spec"]["containers"] if each["name"] == "worker"]
    return found


def gpus_of(container: dict[str, Any]) -> int:
    return sum(n for key, n in container["resources"]["limits"].items() if "nvidia.com" in key)


def arguments(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container.get("args", [])]


def option(container: dict[str, Any], name: str) -> str:
    words = arguments(container)
    return words[words.index(name) + 1]


@pytest.mark.parametrize("name", SETS)
def test_every_process_loads_the_rendered_settings_and_its_secrets(name: str, tmp_path: Path):
    loaded = [
        settings(name, tmp_path, each) for _, each in containers(name) if "TINSMITH_SETTINGS" in environment(each)
    ]
    assert len(loaded) == 1 + len(workers(name))
    for found in loaded:
        assert "hush" in found.redis.url
        assert "hush" in found.broker_url
        assert found.store.access_key == found.store.secret_key == "hush"
        for base in found.base_models:
            base.check_quantized()
            checks.ranks(base)
        placement.check(found)
    assert [bool(found.api_keys) for found in loaded].count(True) == 1


@pytest.mark.parametrize("name", SETS)
def test_every_worker_serves_a_base_model_of_the_settings_with_its_gpus_and_its_port(name: str, tmp_path: Path):
    started = set()
    for one, _, container in workers(name):
        found = settings(name, tmp_path, container)
        base = found.base_model(option(container, "--base"))
        assert base is not None
        role = "trainer" if "workers.trainer" in " ".join(arguments(container)) else "sampler"
        if "--full" in arguments(container):
            role = f"full_{role}"
        section = base.workers["full" if role == "full_trainer" else role]
        assert gpus_of_copies(role, section.devices, section.count) == ((),)
        assert [port["containerPort"] for port in container["ports"]] == [section.metrics_port]
        size = one["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
        gpus = {size * gpus_of(each) for each in chart.containers(one)}
        assert gpus == {0 if name == "cpu-demo" else section.gpus_needed}
        started.add((role, base.name))
    assert started == {(role, base.name) for base in found.base_models for role in roles(base)}


def test_a_section_without_workers_is_off_and_full_fine_tuning_has_workers_of_its_own(tmp_path: Path):
    values = chart.values_of(chart.FOLDER / "values" / "cpu-demo.yaml")
    values["keda"] = {"enabled": True}
    (base,) = values["baseModels"]
    base["full"] = base["full_sampler"] = base.pop("sampler")
    rendered = chart.render(values)
    for one in rendered:
        chart.validate(one)
    names = {one["metadata"]["name"] for one in rendered if one["kind"] == "StatefulSet"}
    assert {"tinsmith-full-smollm2-135m", "tinsmith-full-sampler-smollm2-135m"} <= names
    (config,) = [one for one in rendered if one["metadata"]["name"] == "tinsmith-settings"]
    (tmp_path / "tinsmith.toml").write_text(config["data"]["tinsmith.toml"])
    (found,) = load(tmp_path / "tinsmith.toml", {}).base_models
    assert list(roles(found)) == ["trainer", "full_trainer", "full_sampler"]
    scaled = [one for one in rendered if one["kind"] == "ScaledObject"]
    assert [located(one["spec"]["triggers"][0])[1]["role"] for one in scaled] == list(roles(found))
    for one in rendered:
        if one["metadata"]["name"].startswith("tinsmith-full"):
            for container in chart.containers(one):
                assert arguments(container)[-1] == "--full"


@pytest.mark.parametrize("name", SETS)
def test_a_worker_has_the_time_that_its_orderly_stop_takes_before_it_is_killed(name: str):
    stop_s = orderly_stop._WITHIN_S + runtime._STOP_S
    for one, pod, _ in workers(name):
        needed = stop_s if one["kind"] == "StatefulSet" else stop_s + multinode._GRACE_S
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed, one["metadata"]["name"]
        assert pod["spec"]["shareProcessNamespace"], "a PID 1 without a handler would not end while it loads"


@pytest.mark.parametrize("name", SETS)
def test_the_api_is_replaced_without_a_gap_and_stops_in_time(name: str):
    deployment = manifest(name, "Deployment", "-api")
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert "replicas" in deployment["spec"] or manifests(name, "HorizontalPodAutoscaler")
    assert deployment["spec"].get("replicas", 2) >= 2
    (pod,) = chart.pods(deployment)
    (container,) = chart.containers(deployment)
    graceful_s = int(_constant("app/gunicorn_conf.py", "graceful_timeout"))
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > waits_s + graceful_s
    paths = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
        assert container[probe]["httpGet"]["path"] != "/readyz", "no worker runs, and the API has to take the calls"


def test_a_pod_of_the_api_has_the_disk_of_its_node_for_archives_unless_a_value_bounds_it():
    """An archive holds a copy of its largest file there, such as 64 GB of an optimizer. Kubernetes evicts a pod above
    its bound, which `engine.free_disk_bytes` does not see."""
    for storage, volume in (("", {}), ("100Gi", {"sizeLimit": "100Gi"})):
        rendered = chart.render({**values("cpu-demo"), "api": {"storage": storage}})
        (deployment,) = [one for one in rendered if one["kind"] == "Deployment"]
        chart.validate(deployment)
        (pod,) = chart.pods(deployment)
        assert [one["emptyDir"] for one in pod["spec"]["volumes"] if one["name"] == "data"] == [volume]


def _constant(file: str, name: str) -> str:
    (line,) = [line for line in (ROOT / file).read_text().splitlines() if line.startswith(f"{name} = ")]
    return line.removeprefix(f"{name} = ")


@pytest.mark.parametrize("name", SETS)
def test_new_weights_go_through_a_folder_that_trainers_and_samplers_share_or_through_the_object_store(
    name: str, tmp_path: Path
):
    for _, pod, container in workers(name):
        engine = settings(name, tmp_path, container).engine
        shared = [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]
        if engine.handover_bytes:
            (volume,) = shared
            (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
            assert Path(engine.handover_dir).parent == Path(mount["mountPath"])
        else:
            assert shared == []


def test_samplers_are_placed_beside_the_trainers_that_leave_weights_in_the_nodes_memory():
    found = {one["metadata"]["name"]: pod["spec"].get("affinity") for one, pod, _ in workers("one-gpu")}
    assert found["tinsmith-trainer-qwen3-4b"] is None
    (term,) = found["tinsmith-sampler-qwen3-4b"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    (trainer,) = [pod for one, pod, _ in workers("one-gpu") if "trainer" in one["metadata"]["name"]]
    assert labels.items() <= trainer["metadata"]["labels"].items()


def test_the_leader_writes_a_hostfile_with_a_slot_for_each_rank_itself_first(tmp_path: Path):
    ((one, _, container),) = [found for found in workers("several-nodes") if found[0]["kind"] == "LeaderWorkerSet"]
    trainer = settings("several-nodes", tmp_path, container).base_models[0].trainer
    hosts = tmp_path / "hosts"
    shell, flags, script, *rest = container["command"]
    script = script.replace("/usr/sbin/sshd", "true").replace(trainer.hostfile, str(hosts))
    assert "exec python " in script
    script = script.replace("exec python ", "exec echo ")
    environ = {"HOSTNAME": f"{one['metadata']['name']}-0", "PATH": "/usr/bin:/bin"}
    command = [shell, flags, script, *rest, *container["args"]]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.split() == ["-m", "workers.trainer", "--base", "Qwen/Qwen3-235B-A22B", "--name", "trainer"]
    group = one["metadata"]["name"]
    slots = trainer.model_copy(update={"hostfile": str(hosts)}).slots()
    assert list(slots) == [f"{group}-0.{group}", f"{group}-0-1.{group}"]


def test_the_hosts_of_a_group_share_the_data_folder_and_reach_each_other():
    group = manifest("several-nodes", "LeaderWorkerSet", "-trainer-qwen3-235b")
    pods = list(chart.pods(group))
    assert len(pods) == 2
    volumes = [{volume["name"]: volume for volume in pod["spec"]["volumes"]} for pod in pods]
    assert volumes[0]["data"] == volumes[1]["data"]
    assert volumes[0]["data"].keys() == {"name", "persistentVolumeClaim"}
    sshd = manifest("several-nodes", "ConfigMap", "-ssh")["data"]["sshd_config"]
    (mount,) = [mount for mount in next(chart.containers(group))["volumeMounts"] if mount["name"] == "data"]
    assert f"SetEnv TMPDIR={mount['mountPath']}" in sshd, "sshd passes none of the image's environment on"
    policy = manifest("several-nodes", "NetworkPolicy", "-trainer-qwen3-235b")["spec"]
    selector = policy["podSelector"]["matchLabels"]
    assert all(selector.items() <= pod["metadata"]["labels"].items() for pod in pods)
    assert {"from": [{"podSelector": {"matchLabels": selector}}]} in policy["ingress"]
    assert policy["egress"] == [{"to": [{"podSelector": {"matchLabels": selector}}]}]


def test_a_member_that_is_stopped_beside_its_leader_waits_until_its_ranks_have_ended(tmp_path: Path):
    """Its sshd would end at once, and its ranks with it: rank 0 could not end in order."""
    group = manifest("several-nodes", "LeaderWorkerSet", "-trainer-qwen3-235b")
    (member,) = [each for each in chart.containers(group) if each["name"] == "member"]
    shell, flag, script = member["lifecycle"]["preStop"]["exec"]["command"]
    ranks = ["python", "-m", node.__name__]
    for pid, command in enumerate((member["command"], [shell, flag, script], ranks), 1):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text("\0".join([*command, ""]))
    with subprocess.Popen([shell, flag, script.replace("/proc", str(tmp_path))]) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2)
        (tmp_path / "3" / "cmdline").unlink()
        assert waiting.wait(60) == 0


def _directives(text: str) -> dict[str, str]:
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line for line in lines)


def test_the_bundled_state_server_has_the_settings_of_the_compose_file():
    ours = _directives(manifest("cpu-demo", "ConfigMap", "-valkey")["data"]["valkey.conf"])
    assert ours == {**_directives((ROOT / "ops" / "redis" / "valkey.conf").read_text()), "dir": "/data"}
    state, broker = (manifest("cpu-demo", "StatefulSet", ending) for ending in ("-valkey", "-broker"))
    (claim,) = state["spec"]["volumeClaimTemplates"]
    for one in (state, broker):
        (container,) = chart.containers(one)
        script = container["command"][-1]
        assert "requirepass $REDISCLI_AUTH" in script, "the password is on no command line"
        assert one["spec"]["replicas"] == 1
    (mount,) = [mount for mount in next(chart.containers(state))["volumeMounts"] if mount["mountPath"] == ours["dir"]]
    assert mount["name"] == claim["metadata"]["name"]


def test_an_upgrade_or_a_setting_of_one_server_restarts_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def templates(**further: Any) -> dict[str, Any]:
        rendered = chart.render({**values("cpu-demo"), **further})
        return {one["metadata"]["name"]: one["spec"]["template"] for one in rendered if one["kind"] == "StatefulSet"}

    def changed(found: dict[str, Any]) -> set[str]:
        return {name for name, template in found.items() if template != before[name]}

    before = templates()
    assert changed(templates(broker={"maxmemory": "200mb"})) == {"tinsmith-broker"}
    assert changed(templates(valkey={"maxmemory": "1gb"})) == {"tinsmith-valkey"}
    newer = shutil.copytree(chart.CHART, tmp_path / "tinsmith")
    about = newer / "Chart.yaml"
    about.write_text(about.read_text().replace("0.1.0", "0.2.0"))
    monkeypatch.setattr(chart, "CHART", newer)
    assert changed(templates()) & {f"tinsmith-{server}" for server in ("valkey", "broker", "minio")} == set()


def located(trigger: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The name and the labels of the metric that KEDA reads."""
    name, labels = re.fullmatch(r"(\w+)\{(.*)\}", trigger["metadata"]["valueLocation"]).groups()
    return name, dict(re.findall(r'(\w+)="([^"]*)"', labels))


@pytest.mark.parametrize("name", ["eight-gpus", "several-nodes"])
def test_an_autoscaler_starts_every_worker_by_its_backlog_and_nothing_else_sets_the_number(name: str, tmp_path: Path):
    api = manifest(name, "Service", "-api")
    url = f"http://{api['metadata']['name']}.{chart.NAMESPACE}.svc:{api['spec']['ports'][0]['port']}/metrics"
    targets = {}
    for one in manifests(name, "ScaledObject"):
        spec = one["spec"]
        assert spec["minReplicaCount"] == 0
        assert spec["maxReplicaCount"] >= 1
        for trigger in spec["triggers"]:
            assert trigger["metadata"]["url"] == url
            assert trigger["metricType"] == "AverageValue", "Value multiplies the number of workers that run"
        metrics = [metric for metric, _ in map(located, spec["triggers"])]
        assert metrics in (["tinsmith_backlog"], ["tinsmith_backlog", "tinsmith_backlog_age_seconds"])
        (labels,) = {frozenset(labels.items()) for _, labels in map(located, spec["triggers"])}
        targets[spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]] = dict(labels)
    for one, _, container in workers(name):
        base = settings(name, tmp_path, container).base_model(option(container, "--base"))
        labels = targets.pop((one["kind"], one["metadata"]["name"]))
        assert labels["base_model"] == base.name
        assert labels["role"] in roles(base)
        assert labels["role"] == option(container, "--name"), "these sets have no full fine-tuning"
        assert "replicas" not in one["spec"], "each upgrade would reset the number"
    assert targets == {}


def test_the_metrics_that_it_reads_are_those_of_the_api_and_are_there_at_zero():
    exported = telemetry.Queues()
    spec = manifest("eight-gpus", "ScaledObject", "-sampler-qwen3-32b")["spec"]
    exported.set([], {("sampler", "Qwen/Qwen3-32B"): Waiting(0, 0.0)})
    found = {(sample.name, frozenset(sample.labels.items())) for one in exported.collect() for sample in one.samples}
    asked = {(name, frozenset(labels.items())) for name, labels in map(located, spec["triggers"])}
    assert {name for name, _ in asked} == {"tinsmith_backlog", "tinsmith_backlog_age_seconds"}
    assert asked <= found


def test_the_age_of_waiting_calls_starts_workers_where_it_is_asked_for():
    targets = {
        one["metadata"]["name"]: {
            located(trigger)[0]: trigger["metadata"]["targetValue"] for trigger in one["spec"]["triggers"]
        }
        for one in manifests("eight-gpus", "ScaledObject")
    }
    assert targets == {
        "tinsmith-trainer-qwen3-32b": {"tinsmith_backlog": "8"},
        "tinsmith-sampler-qwen3-32b": {"tinsmith_backlog": "64", "tinsmith_backlog_age_seconds": "120"},
    }


@pytest.mark.parametrize("cooldown_s", [0, 7200])
@pytest.mark.parametrize("name", SETS)
def test_a_worker_that_still_loads_its_model_is_not_stopped(name: str, cooldown_s: int):
    rendered = chart.render({**values(name), "keda": {"enabled": True, "cooldownSeconds": cooldown_s}})
    probes = {
        one["metadata"]["name"]: container["startupProbe"]
        for one in rendered
        if one["kind"] in WORKERS
        for container in chart.containers(one)
        if container["name"] == "worker"
    }
    for one in rendered:
        if one["kind"] == "ScaledObject":
            chart.validate(one)
            probe = probes.pop(one["spec"]["scaleTargetRef"]["name"])
            least_s = max(cooldown_s, probe["periodSeconds"] * probe["failureThreshold"])
            assert one["spec"]["cooldownPeriod"] >= least_s
            assert one["spec"]["initialCooldownPeriod"] >= least_s
    assert probes == {}


def test_without_keda_the_number_of_workers_is_that_of_the_values():
    assert not manifests("cpu-demo", "ScaledObject")
    assert [one["spec"]["replicas"] for one, _, _ in workers("cpu-demo")] == [1, 1]
