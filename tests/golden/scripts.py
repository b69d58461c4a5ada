"""The state server's scripts, by the stores that call them: fixed scenarios, each on an empty server."""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app import dispatch
from app.domain.limits import Charge, Limits, Payer
from app.domain.records import Checkpoint, Model, Sampler, Session, ShmTransfer, Worker
from app.domain.results import Result
from app.settings import EngineSettings, RedisSettings, Settings
from app.stores.objects.folder import FolderStore
from app.stores.pages import LedgerPage, StorageUse
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.completions import RedisCompletions, TokenChunk, TokenStreams
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease, QueueBounds
from tests.golden.recording import Recorded, Scenario

M, N, S = "session:train:0", "session:train:1", "session:sample:0"
QUEUE = "sample.base"
# No lease expires while a scenario runs, however slow the machine.
SETTINGS = EngineSettings(lease_s=3600.0)
OK, FAILED = Result(b'{"ok": 1}'), Result(b'{"error": "why"}', failed=True)


def goldens(url: str) -> dict[str, Any]:
    """Goldens of a server with no other user."""
    with Recorded.from_url(url) as client:
        while True:
            hour, found = _hour(client), {name: _played(play, client, url) for name, play in SCENARIOS.items()}
            if _hour(client) == hour:  # otherwise the usage ledger may have a page of each
                return found


def _hour(client: Recorded) -> int:
    return int(client.time()[0]) // 3600


def _played(play: Callable[[Scenario, str], None], client: Recorded, url: str) -> list[dict[str, Any]]:
    scenario = Scenario(client)
    play(scenario, url)
    return scenario.steps


def _model(**fields: Any) -> dict[str, str]:
    return dump(Model("me", "session", "base", 0.0, **fields))


def _journal(step: Scenario, url: str) -> None:
    log, store = RedisOpLog(step.client, SETTINGS), RedisRecords(step.client)
    step("a session", lambda: store.put_new("sessions", "session", dump(Session("me", 0.0))))
    step("a model", lambda: log.create_model(M, _model()))
    step("a model again", lambda: log.create_model(M, _model()))
    admit = log.admit
    step("create", lambda: admit(M, 0, "create_model", b"zero", "d0"))
    step(
        "create, by the call itself", lambda: admit(N, 0, "create_model", b"n", "dn", _model(key="key"), audited="who")
    )
    step("a gradient", lambda: admit(M, 1, "forward_backward", b"x" * 70_000, "d1"))
    step("a gradient again", lambda: admit(M, 1, "forward_backward", b"x" * 70_000, "d1"))
    step("other content", lambda: admit(M, 1, "forward_backward", b"y", "d2"))
    step("no such model", lambda: admit("other:train:0", 0, "create_model", b"z", "d"))
    step("behind a gap", lambda: admit(M, 3, "optim_step", b"three", "d3"))
    step.left("admitted")
    step("pending", lambda: log.pending(), 2)
    step("unowned", lambda: log.unowned("train.base"))
    step("waiting", lambda: log.waiting(M, 0))
    step("heads", lambda: log.heads({M: 0, N: 1}))
    step("room", log.shortage)
    step("calls are taken", lambda: log.take_calls(600))
    lease = step("acquire", lambda: log.acquire(M, "a/1"))
    assert isinstance(lease, Lease)
    step("acquire, of another", lambda: log.acquire(M, "b/1"))
    step("acquire, unknown", lambda: log.acquire("other:train:0", "b/1"))
    step("renew", lambda: log.renew([M, N], "a/1"))
    step("next", lambda: log.next(lease, 0), 3)
    ready = [("models", M, {"state": '"ready"', "lora": "{}"})]
    step("commit", lambda: log.commit(lease, 0, OK, ready, usage={"training": 5}))
    step("commit again", lambda: log.commit(lease, 0, OK))
    step("admit what is behind", lambda: admit(M, 0, "create_model", b"other", "d9"))
    step.left("committed")
    step("next", lambda: log.next(lease, 1), 3)
    step("a strike", lambda: log.strike(lease, 1))
    step("put off", lambda: log.put_off(lease, 1))
    step("lost batch", lambda: log.refuse(M, 2, "too long", "lost_batch"))
    step("refused seq", lambda: admit(M, 2, "forward_backward", b"two", "d2"))
    step("refuse a taken seq", lambda: log.refuse(M, 3, "too long"))
    step("next, doomed", lambda: log.next(lease, 3), 3)
    step("next, not there", lambda: log.next(lease, 7))
    step("skip", lambda: log.refuse(M, 5, "no"))
    step("give up a gap", lambda: log.refuse(M, 4, "did not come", "drop_gradients"))
    adapter = f"models/{M}/sampler_weights/a/1-1"
    handed = [("handovers", adapter, dump(ShmTransfer(M, 1)))]
    step("commit, handed over", lambda: log.commit(lease, 1, OK, handed))
    step("fail", lambda: log.commit(lease, 2, FAILED, why="lost"))
    step("fail an optim_step", lambda: log.commit(lease, 3, FAILED, why="no step"))
    step.left("failed")
    step("snapshot, needed", lambda: log.set_snapshot(lease, 3, "models/snap/3-1"))
    step("handed over", lambda: store.delete("handovers", adapter))
    step("snapshot", lambda: log.set_snapshot(lease, 3, "models/snap/3-1"))
    step("snapshot again", lambda: log.set_snapshot(lease, 3, "models/snap/3-1"))
    step("snapshot, older", lambda: log.set_snapshot(lease, 2, "models/snap/2-1"))
    step("read", lambda: log.future(f"{M}:1", {"me"}))
    step("outcome", lambda: log.outcome(f"{M}:1"))
    step("release", lambda: log.release(M, "a/1"))
    step("lead", lambda: [log.lead("ringing", worker) for worker in ("a/1", "b/1", "a/1")])
    step("acquire anew", lambda: log.acquire(M, "b/1"))
    step("fenced", lambda: log.next(lease, 4))
    step("calls", lambda: RedisCalls(step.client).of_model(M))
    step.left("snapshot taken, and acquired anew")


def _payloads(step: Scenario, url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        objects = FolderStore(Path(folder), "secret", "http://host")
        settings = SETTINGS.model_copy(update={"payload_budget_bytes": 20_000, "spill_bytes": 5000})
        log, payloads = RedisOpLog(step.client, settings, objects), RedisPayloads(step.client, settings, objects)
        log.create_model(M, _model())
        step("large", lambda: log.admit(M, 0, "create_model", b"x" * 6000, "d0"))
        step("smaller", lambda: log.admit(M, 1, "forward_backward", b"y" * 4200, "d1"))
        step("no room", lambda: log.admit(M, 2, "forward_backward", b"z" * 12_000, "d2"))
        step("room", log.shortage)
        step("due", lambda: payloads.due(10))
        step("spill", lambda: payloads.spill(f"{M}:0"))
        step("spill again", lambda: payloads.spill(f"{M}:0"))
        step.left("spilled")
        lease = log.acquire(M, "a/1")
        assert isinstance(lease, Lease)
        step("end", lambda: RedisLifecycle(step.client, settings).end_model(M))
        step("garbage", payloads.remove_garbage)
        assert objects.list("") == []
        step.left("ended")


def _samples(step: Scenario, url: str) -> None:
    log, store = RedisOpLog(step.client, SETTINGS), RedisRecords(step.client)
    ended, tokens = RedisCompletions(step.client, SETTINGS), {"sampling_sample": 7}
    worker = Worker("sampler", "base", {"name": "base"}, {}, "http://x", 0.0, True, QUEUE, batch=4, holds=8)
    step("samplers", lambda: [store.put("workers", node, dump(worker), ttl_s=3600) for node in ("s1", "s2")])
    step("session", lambda: store.put_new("sessions", "session", dump(Session("me", 0.0))))
    step("sampling session", lambda: store.put_new("samplers", S, dump(Sampler("me", "session", "base", 0.0))))
    step("join", lambda: [store.join(S), store.join(S)])
    step("join, unknown", lambda: store.join("other:sample:0"))

    def admit(seq: int, digest: str = "d", parent: str = S, **more: Any) -> Any:
        return log.admit_sample(f"{parent}:{seq}", parent, "me", QUEUE, b"payload", digest, **more)

    payers = (Payer("project", "me", Limits()), Payer("key", "k", Limits(concurrent_samples=200)))
    charge = Charge(payers, tokens=9, samples=2)
    step("admit", lambda: admit(0, tokens=9, sequences=2, charge=charge))
    step("admit again", lambda: admit(0, tokens=9, sequences=2, charge=charge))
    step("other content", lambda: admit(0, "other"))
    step("no such session", lambda: admit(0, parent="other:sample:0"))
    step("another clone's", lambda: admit(1_000_000_000, tokens=5))
    step("too large", lambda: admit(2, tokens=50, bounds=QueueBounds(10, 40)))
    step("too many requests", lambda: admit(2, tokens=5, bounds=QueueBounds(2, 400)))
    step("too many tokens", lambda: admit(2, tokens=35, bounds=QueueBounds(10, 40)))
    step("fills what is rung for", lambda: admit(3, tokens=5, sequences=64))
    step("held", lambda: admit(4, tokens=5, sequences=64))
    step("too many sequences", lambda: admit(5, charge=Charge(payers, samples=200)))
    step.left("admitted")
    step("pending", lambda: log.pending(), 2)
    step("unfinished", lambda: RedisBacklog(step.client, SETTINGS).unfinished(100))
    step("claim", lambda: log.claim_sample(f"{S}:0", "s1/1", 1), 2)
    step("claim, of another", lambda: log.claim_sample(f"{S}:0", "s2/1"))
    step("renew", lambda: log.renew([f"{S}:0", f"{S}:3"], "s1/1"))
    step("tried", lambda: step.client.hset(f"tinsmith:op:{S}:1000000000", "attempts", 2))
    step("tried often", lambda: log.claim_sample(f"{S}:1000000000", "s1/1", 1))
    step("last attempt", lambda: log.claim_sample(f"{S}:1000000000", "s1/1"), 2)
    step.left("claimed")
    step("finish", lambda: log.finish_sample(f"{S}:0", OK, tokens))
    step("finish again", lambda: log.finish_sample(f"{S}:0", OK, tokens))
    step("claim what is finished", lambda: log.claim_sample(f"{S}:0", "s1/1"))
    step("claim", lambda: log.claim_sample(f"{S}:3", "s2/1"), 2)
    step("put off", lambda: log.put_off_sample(f"{S}:3", "s2/1"))
    step("release", lambda: log.release_samples(QUEUE, ["me"]))
    step.left("put off")
    step("cancel", lambda: log.cancel_sample(f"{S}:1000000000"))
    step("cancel again", lambda: log.cancel_sample(f"{S}:1000000000"))
    step.left("cancelled")
    step("what it took", lambda: log.put_off_sample(f"{S}:1000000000", "s1/1"))  # ecb7b39 counts no usage here
    step("completions", lambda: ended.since(f"{S}/0", 0))
    step("completions, of another clone", lambda: ended.since(f"{S}/1", 0))
    step("acknowledge", lambda: ended.acknowledge([f"{S}:0", f"{S}:3"]))
    step("completions, behind", lambda: ended.since(f"{S}/0", 1))
    step("read", lambda: log.future(f"{S}:1000000000", {"me"}))
    step("calls", lambda: RedisCalls(step.client).of_sampler(S))
    step("fail", lambda: log.finish_sample(f"{S}:3", FAILED))
    step.left("finished")
    life = RedisLifecycle(step.client, SETTINGS.model_copy(update={"retain_s": 0.001}))
    step("heartbeat", lambda: life.heartbeat("session"))
    step("end of a sampler that lives", lambda: life.end_sampler(S))
    step("finish the session", lambda: life.finish("session", "done"))
    step("abort", life.abort_samples)
    time.sleep(0.01)
    step("end of a sampler", lambda: life.end_sampler(S))
    step.left("session over")


def _lifecycle(step: Scenario, url: str) -> None:
    log, store = RedisOpLog(step.client, SETTINGS), RedisRecords(step.client)
    life = RedisLifecycle(step.client, SETTINGS)
    short = RedisLifecycle(step.client, SETTINGS.model_copy(update={"session_s": 0.001, "retain_s": 0.001}))
    store.put_new("sessions", "session", dump(Session("me", 0.0)))
    step("heartbeat", lambda: life.heartbeat("session"))
    log.admit(M, 0, "create_model", b"m", "d", _model(key="key"))
    log.admit(M, 1, "load_weights", b"l", "d1")
    log.admit(N, 0, "create_model", b"n", "d", _model(full=True))
    sampler = Sampler("me", "session", "base", 0.0)
    step("a sampler", lambda: store.put_new("samplers", S, dump(sampler)))
    saved = Checkpoint("me", M, "weights", "base", "models/p", 0.0, 123, {}, [], key="key")
    step("a checkpoint", lambda: store.put("checkpoints", f"tinker://{M}/weights/a", dump(saved)))
    step("move", lambda: life.move("session", "other"))
    step.left("moved")
    step("acquire", lambda: log.acquire(M, "a/1"))
    step("holders", lambda: life.holders([M, N]))
    step("loads", lambda: list(life.loads([M])))
    step("unload", lambda: life.unload(M))
    step("unwanted", lambda: life.unwanted([M, N]))
    step("lines", lambda: RedisBacklog(step.client, SETTINGS).unfinished(10))
    step("end", lambda: life.end_model(M))
    step("end again", lambda: life.end_model(M))
    step("admit to what has ended", lambda: log.admit(M, 2, "optim_step", b"", "d2"))
    step("acquire what has ended", lambda: log.acquire(M, "a/1"))
    step("retire what lives", lambda: life.end_model(N, retired=True))
    step.left("ended")
    time.sleep(0.01)
    step("expire", short.expire)
    step("expire, heard of", life.expire)
    step("unwanted", lambda: life.unwanted([M, N]))
    step.left("expired")
    step("heard of again", lambda: life.heartbeat("session"))
    step("finish", lambda: life.finish("session", "done"))
    step("finish again", lambda: life.finish("session", "other"))
    time.sleep(0.01)
    step("retired", short.retired)
    step("retire", lambda: short.end_model(N, retired=True))
    step("end a sampler", lambda: short.end_sampler(S))
    step("forget", lambda: [life.forget("session"), short.forget("session")])
    step("overdue", lambda: life.overdue(["models/a", "models/b"]))
    step("overdue, one", lambda: life.overdue(["models/b"]))
    step.left("forgotten")


def _records(step: Scenario, url: str) -> None:
    store = RedisRecords(step.client)
    one, other = {"a": "1", "b": "2"}, {"b": "3"}
    step("put", lambda: store.put("things", "x", one, ttl_s=60))
    step("put new", lambda: [store.put_new("things", "y", one), store.put_new("things", "y", other)])
    versions = (1, 3, 2)
    newer = lambda: [store.put_newer("keys", "k", at, {"version": str(at)}) for at in versions]  # noqa: E731
    step("put newer", newer)
    step("update", lambda: [store.update("things", "y", other), store.update("things", "none", other)])
    step(
        "delete the same", lambda: [store.delete_same("things", "y", fields) for fields in (one, {"a": "1", "b": "3"})]
    )
    step("delete", lambda: store.delete("things", "none"))
    step.left("put")


def _usage_pages(step: Scenario, url: str) -> None:
    store, pages = RedisRecords(step.client), RedisPages(step.client, SETTINGS)
    step("note", lambda: store.note("audit", "me", "id", "text"))
    step("note again", lambda: store.note("audit", "me", "id", "other"))
    step("note, urgent", lambda: store.note("audit", "me", "other", "text", urgent=True))
    held = [StorageUse("me", "base", 1, 2**60)]
    step("measure", lambda: [pages.measure(None, 5.5, held), pages.measure(None, 6.5, held)])
    step("measured", pages.measured)
    step("measure again", lambda: pages.measure(5.5, 6.5, held))
    step.left("written")
    step("close", lambda: pages.close(10))
    step("drop", lambda: pages.drop(LedgerPage("usage", "me", 1)))
    step("late", lambda: pages.measure(6.5, 7.5, held))
    step.left("closed")


def _limits(step: Scenario, url: str) -> None:
    log, store = RedisOpLog(step.client, SETTINGS), RedisRecords(step.client)
    quotas = RedisQuotas(step.client, SETTINGS)
    store.put_new("sessions", "session", dump(Session("me", 0.0)))
    RedisLifecycle(step.client, SETTINGS).heartbeat("session")
    limits = Limits(requests_per_s=1000.0, tokens_per_s=1.0, live_models=1, storage_bytes=100, concurrent_samples=1)
    key, project = Payer("key", "k", limits), Payer("project", "me", Limits(tokens_per_s=1e6))
    for name in ("leaves a debt", "too many tokens"):
        step(name, lambda: quotas.take(Charge((project, key), tokens=10**6)), 3, 5)
    roomy = Payer("key", "k", Limits(live_models=1, storage_bytes=100))
    making = Charge((project, roomy), models=1)
    make = lambda id_: log.admit(id_, 0, "create_model", b"", "d", _model(key="k"), charge=making)  # noqa: E731
    step("a run", lambda: make(M))
    step("a run too many", lambda: make(N))
    saved = Checkpoint("me", M, "weights", "base", "p", 0.0, 99, {}, [], key="k")
    store.put("checkpoints", f"tinker://{M}/weights/a", dump(saved))
    storing = Charge((project, roomy), stores=True, stored=2)
    step("too much stored", lambda: log.admit(M, 1, "save_weights", b"", "d1", charge=storing))
    step("used", lambda: [quotas.used(payer) for payer in (key, project)], 3, 4)
    step.left("limited")


def _tokens(step: Scenario, url: str) -> None:
    streams = TokenStreams(step.client)
    drawn = TokenChunk(f"{S}:0", 1, 2, np.array([5, 6], np.int64), np.array([-0.5, -1.0]))
    step("drawn", lambda: streams.add([drawn]))
    step.left("a stream")


def _dispatching(step: Scenario, url: str) -> None:
    """A task's message: its name, its id and its arguments."""
    with dispatch.celery_app(Settings(redis=RedisSettings(url=url, broker_url=url))) as celery:
        dispatch.Dispatcher(celery).send("forward_backward", f"{M}:1", M, "train.base")
        dispatch.TickSender(celery, "train.base@a").send()
    for queue, keep in (("train.base", ("task", "id")), ("train.base@a", ("task",))):
        (data,) = step.client.lrange(queue, 0, -1)
        step.steps.append({"queue": queue, **_message(data, keep)})


def _message(data: bytes, keep: tuple[str, ...]) -> dict[str, Any]:
    message = json.loads(data)
    arguments = json.loads(base64.b64decode(message["body"]))[:2]
    return {"headers": {name: message["headers"][name] for name in keep}, "arguments": arguments}


SCENARIOS: dict[str, Callable[[Scenario, str], None]] = {
    "journal": _journal,
    "payloads": _payloads,
    "samples": _samples,
    "lifecycle": _lifecycle,
    "records": _records,
    "books": _usage_pages,
    "limits": _limits,
    "tokens": _tokens,
    "ringing": _dispatching,
}
