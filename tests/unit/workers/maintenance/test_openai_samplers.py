"""Samplers of OpenAI-compatible calls end when nobody uses them, so that the saves they name can be deleted."""

from __future__ import annotations

import redis

from app import ids
from app.domain.records import Sampler
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from tests.unit.workers.maintenance.test_adapters import HASTY, PATIENT, RUN, Installation, installation, sweep_orphans

__all__ = ["installation"]

SESSION = ids.openai_session_id("me")
OLD = f"models/{RUN}/sampler_weights/a/4-1"


def make(installation: Installation, prefix: str = OLD, created: float = 0.0) -> str:
    """The sampler of a save that was replaced since: no checkpoint names its files."""
    path = f"tinker://{RUN}/sampler_weights/a"
    sampler_id = ids.openai_sampler_id(SESSION, "base", prefix)
    sampler = Sampler("me", SESSION, "base", created, path if prefix else "", prefix)
    installation.records.put(Sampler.namespace, sampler_id, dump(sampler))
    if prefix:
        installation.store.put_new(f"{prefix}/manifest.json", b"{}")
    return sampler_id


def samplers(installation: Installation) -> set[str]:
    return {sampler_id for sampler_id, _ in installation.records.list(Sampler.namespace)}


def test_a_save_that_was_replaced_is_deleted_after_its_sampler_was_unused(installation: Installation):
    sampler_id = make(installation)
    sweep_orphans(installation)
    assert installation.stored() == {OLD}, "its sampler may still be asked"
    installation.round()
    assert sampler_id not in samplers(installation)
    sweep_orphans(installation)
    assert installation.stored() == set()


def test_a_running_sample_keeps_its_sampler_until_it_ends(installation: Installation, client: redis.Redis):
    sampler_id = make(installation)
    request = installation.sample(sampler_id)
    client.delete(keys.PREFIX + "samplers_used")
    installation.round()
    assert samplers(installation) == {sampler_id}
    sweep_orphans(installation)
    assert installation.stored() == {OLD}
    installation.oplog.finish_sample(request, Result(b"{}"))
    installation.round()
    assert samplers(installation) == set()


def test_what_was_made_or_used_within_the_time_stays(installation: Installation):
    made = make(installation, f"models/{RUN}/sampler_weights/a/5-1", installation.records.now())
    sampled = make(installation, f"models/{RUN}/sampler_weights/a/6-1")
    installation.oplog.finish_sample(installation.sample(sampled), Result(b"{}"))
    about_to_be = make(installation, f"models/{RUN}/sampler_weights/a/7-1")
    assert RedisLifecycle(installation.client, PATIENT).use_sampler(about_to_be)
    make(installation)
    installation.round(PATIENT)
    assert samplers(installation) == {made, sampled, about_to_be}


def test_a_sampler_that_is_about_to_be_made_is_not_ended_before_its_first_request(installation: Installation):
    sampler_id = ids.openai_sampler_id(SESSION, "base", OLD)
    assert not RedisLifecycle(installation.client, PATIENT).use_sampler(sampler_id)
    assert make(installation) == sampler_id
    installation.round(PATIENT)
    assert installation.sample(sampler_id)


def test_a_use_is_noted_anew_once_half_of_the_time_has_passed(installation: Installation, client: redis.Redis):
    used, lifecycle = keys.PREFIX + "samplers_used", RedisLifecycle(client, EngineSettings(ephemeral_s=100))
    now = int(installation.records.now() * 1000)
    client.zadd(used, {"young": now - 30_000, "old": now - 60_000})
    for sampler_id in ("young", "old"):
        lifecycle.use_sampler(sampler_id)
    assert client.zscore(used, "young") == now - 30_000
    assert client.zscore(used, "old") >= now


def test_samplers_of_base_models_and_of_the_sdk_stay(installation: Installation):
    base = make(installation, prefix="")
    path = f"tinker://{RUN}/sampler_weights/a"
    of_sdk = {f"session:sample:{number}": Sampler("me", "session", "base", 0.0, path, OLD) for number in range(2)}
    of_sdk[f"{SESSION}:sample:0"] = Sampler("me", SESSION, "base", 0.0, path, OLD)
    for sampler_id, sampler in of_sdk.items():
        installation.records.put(Sampler.namespace, sampler_id, dump(sampler))
    installation.round()
    assert samplers(installation) == {base, *of_sdk}


def test_many_end_in_one_round(installation: Installation):
    for seq in range(450):
        make(installation, f"models/{RUN}/sampler_weights/a/{seq}-1")
    installation.round(HASTY)
    assert samplers(installation) == set()
