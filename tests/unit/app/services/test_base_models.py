"""Facts of the base models that are served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from app.domain.ops import LoraSpec
from app.domain.records import FOLLOWS_SCHEMAS, LAST_WORKERS, READS_IMAGES, BaseModelInfo, Refusal, Worker
from app.errors import BadRequest, Unavailable
from app.services.base_models import SHAPES, BaseModels
from app.settings import BaseModelSettings, Settings
from app.stores.redis.records import RedisRecords, dump


def test_a_tokenizers_folder_is_named_by_its_absolute_path_for_as_long_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: redis.Redis
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(base_models=(BaseModelSettings(name="org/tiny", path="weights"),))
    bases = BaseModels(settings, RedisRecords(client))
    assert bases.client_tokenizer("org/tiny") == "weights", "a repository of the Hub"
    (tmp_path / "weights").mkdir()
    assert bases.client_tokenizer("org/tiny") == str(tmp_path / "weights")
    (tmp_path / "weights").rmdir()
    assert bases.client_tokenizer("org/tiny") == "weights"


def test_the_name_of_a_base_model_that_is_served_no_more_is_its_tokenizer(client: redis.Redis) -> None:
    assert BaseModels(Settings(), RedisRecords(client)).tokenizer("org/gone") == "org/gone"


INFO = {
    "name": "org/tiny",
    "arch": "Qwen3ForCausalLM",
    "vocab_size": 320,
    "max_context": 512,
    "dtype": "float32",
    "trainable_groups": ["attn"],
}
SHAPE_ROWS = [["attn", "model.layers.0.self_attn.q_proj", [8, 6, 1]]]


def started(client: redis.Redis) -> tuple[RedisRecords, BaseModels]:
    """An API process that has just started."""
    settings = Settings(base_models=(BaseModelSettings(name="org/tiny", path="org/tiny"),))
    records = RedisRecords(client)
    return records, BaseModels(settings, records)


def test_a_sampler_that_was_started_again_takes_the_adapters_that_it_can_apply_now(client: redis.Redis) -> None:
    records, bases = started(client)
    both = {**INFO, "trainable_groups": ["attn", "mlp"]}
    spec = LoraSpec(rank=4, train_unembed=False)
    bases.check_sampled(spec, "org/tiny")
    records.put(Worker.namespace, "t/1", dump(Worker("trainer", "org/tiny", both, {}, "", 0.0)))
    records.put(Worker.namespace, "s/1", dump(Worker("sampler", "org/tiny", INFO, {}, "", 0.0)))
    with pytest.raises(BadRequest, match="set train_mlp to false"):
        bases.check_sampled(spec, "org/tiny")
    records.put(Worker.namespace, "s/1", dump(Worker("sampler", "org/tiny", both, {}, "", 0.0)))
    bases.check_sampled(spec, "org/tiny")


def test_a_process_that_starts_while_no_worker_runs_has_the_facts_from_the_last_one(client: redis.Redis) -> None:
    records, bases = started(client)
    worker = Worker("trainer", "org/tiny", INFO, {SHAPES: SHAPE_ROWS}, "", 0.0)
    records.put(LAST_WORKERS, Refusal.id("trainer", "org/tiny"), dump(worker))
    assert bases.info("trainer", "org/tiny").max_context == 512
    assert bases._shapes["trainer", "org/tiny"] == SHAPE_ROWS
    assert bases.live() == set(), "it does not count as up"
    assert bases.demanded() == set(), "the calls that wait tell the autoscaler"
    with pytest.raises(Unavailable, match="no sampler"):
        bases.info("sampler", "org/tiny")


def test_a_base_model_that_cannot_be_served_any_more_is_refused_though_it_was_served(client: redis.Redis) -> None:
    records, bases = started(client)
    worker = Worker("trainer", "org/tiny", INFO, {}, "", 0.0)
    records.put(LAST_WORKERS, Refusal.id("trainer", "org/tiny"), dump(worker))
    refusal = Refusal("trainer", "org/tiny", "it is another model now")
    records.put(Refusal.namespace, Refusal.id("trainer", "org/tiny"), dump(refusal))
    with pytest.raises(BadRequest, match="another model now"):
        bases.info("trainer", "org/tiny")


def test_a_base_model_can_do_what_all_of_its_live_workers_can(client: redis.Redis) -> None:
    """A request may run on any of them. Here vLLM has a GPU's host, and transformers a CPU's."""
    records, bases = started(client)
    groups = ["attn", "mlp", "unembed"]
    can = {FOLLOWS_SCHEMAS: True, READS_IMAGES: True}
    vllm = Worker("sampler", "org/tiny", {**INFO, "trainable_groups": ["attn", "mlp"]}, can, "", 0.0)
    cpu = Worker("sampler", "org/tiny", {**INFO, "trainable_groups": groups, "max_context": 256}, {}, "", 0.0)
    both = BaseModelInfo(**{**INFO, "trainable_groups": ("attn", "mlp"), "max_context": 256})
    alone = replace(both, max_context=512, reads_images=True, follows_schemas=True)

    def found(**workers: Worker) -> BaseModelInfo:
        for node in "abc":
            records.delete(Worker.namespace, node)
        for node, worker in workers.items():
            records.put(Worker.namespace, node, dump(worker), ttl_s=60)
        bases.live()
        return bases.info("sampler", "org/tiny")

    assert found(a=replace(cpu, healthy=False)).max_context == 256, "nothing else is known"
    assert found(a=vllm, b=cpu, c=vllm) == found(a=cpu, b=vllm) == both
    assert found(a=vllm, b=replace(cpu, healthy=False)) == alone
    assert found(a=replace(cpu, healthy=False)) == alone, "none lives"
    assert found() == alone


def test_a_trainers_groups_are_those_that_all_trainers_train(client: redis.Redis) -> None:
    records, bases = started(client)
    for node, groups in (("a", ["attn"]), ("b", ["attn", "mlp"])):
        worker = Worker("trainer", "org/tiny", {**INFO, "trainable_groups": groups}, {}, "", 0.0)
        records.put(Worker.namespace, node, dump(worker), ttl_s=60)
    assert [base["trainable_groups"] for base in bases.capabilities()] == [["attn"]]


def test_a_worker_that_was_never_up_is_demanded_for_a_while(client: redis.Redis) -> None:
    _, bases = started(client)
    with pytest.raises(Unavailable):
        bases.info("trainer", "org/tiny")
    assert bases.demanded() == {("trainer", "org/tiny")}
    ttl_ms = client.pttl("tinsmith:demands:trainer/org/tiny")
    assert 60_000 < ttl_ms <= 120_000, "longer than a client waits between two tries"
    client.delete("tinsmith:demands:trainer/org/tiny")
    assert bases.demanded() == set()
