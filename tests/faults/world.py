"""Shared state of all workers and a run on it: journals like the API, and reads like a client and an operator."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import redis

from app import ids
from app.domain import ops
from app.domain.checkpoints import MANIFEST
from app.domain.ops import (
    AdamParams,
    Batch,
    CreateModel,
    ForwardBackward,
    LoraSpec,
    ModelSpec,
    Op,
    OptimStep,
    Ragged,
    SaveWeights,
)
from app.domain.records import Checkpoint, Model, Sampler, ShmTransfer
from app.errors import NotFound
from app.settings import Settings
from app.stores import objects
from app.stores.redis import keys
from app.stores.redis.client import connect, text_fields
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from tests.faults.injection import Fault
from tests.faults.worker_process import Answer, Died, WorkerProcess
from tests.pages import used
from workers.checkpoints import transfer

BASE = "base"
LORA = LoraSpec(rank=4, seed=3)
WITHIN_S = 240
# A budget that no journal keeps to, so that every optim_step is followed by a durable snapshot.
EVERY_STEP = {"journal_bytes": 1}


def batch(seed: int, tokens: int = 9) -> Batch:
    """Two datums, of `tokens` and `tokens` + 1 tokens."""
    generator = np.random.default_rng(seed)
    rows = [generator.integers(3, 300, size=tokens + i) for i in range(2)]
    targets = [np.roll(row, -1) for row in rows]
    return Batch(Ragged.of(rows, np.int32), {"target_tokens": Ragged.of(targets, np.int64)})


def backward(seed: int, tokens: int = 9) -> ForwardBackward:
    return ForwardBackward(batch(seed, tokens), "cross_entropy")


def optim_step() -> OptimStep:
    return OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))


def await_true(what: Callable[[], Any], why: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < deadline, f"in vain for {WITHIN_S} s: {why}"
        time.sleep(0.01)


@dataclass
class World:
    """Shared servers and folders of the workers.

    `engine` overrides the engine's settings, and `store` those of a folder; workers reach it at `store_url`. Each node
    is a machine with its own data folder. Tests dispatch by themselves; the workers' own dispatches are ignored.
    """

    folder: Path
    redis_url: str
    base_path: Path
    store: dict[str, str] = field(default_factory=dict)
    store_url: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = connect(self.redis_url)
        settings = self.settings("test", "")
        self.oplog = RedisOpLog(self.client, settings.engine)
        self.records = RedisRecords(self.client)
        self.objects = objects.create(settings)

    def settings(self, node: str, store_url: str) -> Settings:
        store = self.store or {"url": f"file://{self.folder / 'objects'}"}
        base = {"name": BASE, "path": str(self.base_path), "dtype": "float32", "trainer": {"backend": "torch"}}
        return Settings.model_validate(
            {
                "data_dir": self.folder / node,
                "redis": {"url": self.redis_url},
                "store": {**store, "url": store_url or store["url"]},
                "engine": {"lease_s": 30.0, "handover_dir": str(self.folder / node / "handover"), **self.engine},
                "base_models": [base],
            }
        )

    def worker(self, node: str, *faults: Fault) -> WorkerProcess:
        worker = WorkerProcess(self.settings(node, self.store_url), node, *faults)
        self.workers.append(worker)
        return worker

    def run(self, name: str) -> Run:
        run = Run(self, ids.model_id(name, 0))
        self.oplog.create_model(run.model_id, dump(Model("me", name, BASE, 0.0)))
        run.admit(CreateModel(ModelSpec(BASE, LORA)))
        return run

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.client.close()


@dataclass
class Run:
    """One model's journal."""

    world: World
    model_id: str
    kinds: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        return len(self.kinds) - 1

    def admit(self, *ops: Op) -> int:
        """Journals the Ops in sequence; returns the last one's seq."""
        for op in ops:
            self._admit(len(self.kinds), op)
            self.kinds.append(op.kind)
        return self.last

    def request_id(self, seq: int) -> str:
        return ids.request_id(self.model_id, seq)

    def send(self, worker: WorkerProcess, seq: int) -> None:
        worker.send(self.request_id(seq), self.model_id, self.kinds[seq])

    def head(self) -> dict[str, str]:
        """applied, epoch, worker, snapshot, snapshot_seq, and the Model record."""
        return text_fields(self.world.client.hgetall(keys.model(self.model_id)))

    def error(self, seq: int) -> dict[str, str]:
        """Error of a failed future: its text, and its category."""
        found = self.world.oplog.outcome(self.request_id(seq))
        assert found is not None and found.failed, f"seq {seq} did not fail"
        return json.loads(found.body)

    def result(self, seq: int) -> bytes:
        """Result of a poll, without the ids that differ between runs."""
        found = self.world.oplog.outcome(self.request_id(seq))
        assert found is not None, f"seq {seq} has no result"
        text = b"failed " if found.failed else b"done "
        session = ids.session_of(self.model_id)
        return text + found.body.replace(self.model_id.encode(), b"M").replace(f'"{session}:'.encode(), b'"S:')

    def prefix(self, name: str, kind: str = "weights") -> str:
        """Prefix of a named checkpoint in the store."""
        stored = self.world.records.get(Checkpoint.namespace, self.path(name, kind))
        assert stored is not None, f"{name} is not listed"
        return str(json.loads(stored["prefix"]))

    def path(self, name: str, kind: str = "weights") -> str:
        return str(ids.TinkerPath(self.model_id, kind, name))

    def lapse(self) -> None:
        """Expires the lease of a dead worker, as time would."""
        holder = self.world.client.get(keys.lease(self.model_id)) or b""
        self.world.client.delete(keys.lease(self.model_id), keys.lease(holder.decode()))

    def await_snapshot(self, seq: int, worker: WorkerProcess) -> None:
        """Waits until the durable snapshot is at `seq`, or until the worker that was to take it is dead."""
        await_true(lambda: not worker.alive or int(self.head()["snapshot_seq"]) >= seq, f"no snapshot at {seq}")

    def state(self) -> dict[str, Any]:
        """All visible state, the same for two runs that went alike."""
        listed = [path for path, _ in self.world.records.list(Checkpoint.namespace) if self.model_id in path]
        return {
            "applied": self.head()["applied"],
            "results": {(seq, kind): self.result(seq) for seq, kind in enumerate(self.kinds)},
            "checkpoints": {path.replace(self.model_id, "M"): self.files(self._stored_prefix(path)) for path in listed},
            "samplers": {name.rpartition(":")[2]: self.files(prefix) for name, prefix in self._samplers()},
            "used": self.used(),
        }

    def used(self) -> dict[str, int]:
        """Amounts by kind."""
        found = [(name.split(" "), amount) for name, amount in used(self.world.client).items()]
        return {kind: amount for (kind, session, _), amount in found if session == ids.session_of(self.model_id)}

    def check_objects(self) -> None:
        """Checks that nothing half-written is visible.

        Every object folder with a manifest is complete, and every referenced one has a manifest. A live worker may
        replace a snapshot meanwhile, and deletes its manifest first.
        """
        while True:
            snapshot = self.head()["snapshot"]
            visible, referenced = self._visible(), self._referenced()
            if snapshot == self.head()["snapshot"]:
                break
        assert referenced <= visible
        for checkpoint in visible:
            try:
                assert self.files(checkpoint)
            except NotFound:
                assert checkpoint not in self._visible() | self._referenced()

    def _visible(self) -> set[str]:
        """Object folders with a manifest."""
        keys = self._keys(f"models/{self.model_id}/")
        return {key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")}

    def _referenced(self) -> set[str]:
        listed = {
            self._stored_prefix(p) for p, _ in self.world.records.list(Checkpoint.namespace) if self.model_id in p
        }
        snapshot = {self.head()["snapshot"]} - {""}
        samplers = {prefix for _, prefix in self._samplers()}
        return listed | snapshot | samplers

    def _admit(self, seq: int, op: Op) -> None:
        """Journals as the API's client does it: repeats the call until the write is acknowledged as on disk."""
        payload = ops.encode(op)
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            with suppress(redis.RedisError):
                self.world.oplog.admit(self.model_id, seq, op.kind, payload, ops.digest(payload))
                return
            time.sleep(0.02)
        raise AssertionError(f"seq {seq} could not be admitted")

    def save_for_sampling(self, number: int) -> SaveWeights:
        """Admits a save for a sampling session of this number."""
        session = ids.sampling_session_id(ids.session_of(self.model_id), number)
        return SaveWeights("sampler_weights", f"ephemeral-{number}", sampling_session_id=session)

    def waiting_uploads(self) -> list[str]:
        """Prefixes of the shared-memory transfers that are not in the object store yet."""
        return [prefix for prefix, _ in self.world.records.list(ShmTransfer.namespace, f"models/{self.model_id}/")]

    def _samplers(self) -> list[tuple[str, str]]:
        stored = self.world.records.list(Sampler.namespace, ids.sampler_prefix(ids.session_of(self.model_id)))
        return [(name, str(json.loads(fields["prefix"]))) for name, fields in stored]

    def _stored_prefix(self, path: str) -> str:
        stored = self.world.records.get(Checkpoint.namespace, path)
        assert stored is not None
        return str(json.loads(stored["prefix"]))

    def _keys(self, prefix: str) -> list[str]:
        return self.world.objects.list(prefix)

    def files(self, prefix: str) -> dict[str, str]:
        """Names and sha256 of a checkpoint's files, which are verified during the read."""
        with tempfile.TemporaryDirectory(dir=self.world.folder) as cache:
            transfer.fetch(self.world.objects, prefix, Path(cache))
        manifest = transfer.read_manifest(self.world.objects, prefix)
        return {name: entry.sha256 for name, entry in manifest.files.items()}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Differences between two runs' states; short enough to read."""
    return {
        part: {key: (value, wanted.get(key)) for key, value in found[part].items() if value != wanted.get(key)}
        for part, wanted in expected.items()
        if isinstance(wanted, dict) and found[part] != wanted
    }


@dataclass
class Service:
    """A worker that is restarted whenever it dies: on the same machine, or on the next of `nodes`.

    Requeued or refused calls are dispatched again, as in production; `turned_away` counts them.
    """

    run: Run
    nodes: Iterator[str]
    deaths: int = 0
    turned_away: int = 0

    @classmethod
    def on(cls, run: Run, *nodes: str, faults: tuple[Fault, ...] = ()) -> Service:
        service = cls(run, itertools.cycle(nodes))
        service.start(faults)
        return service

    def start(self, faults: tuple[Fault, ...] = ()) -> None:
        self.worker = self.run.world.worker(next(self.nodes), *faults)

    def replace(self, faults: tuple[Fault, ...] = ()) -> None:
        """Removes the worker, expires its lease, and starts another one."""
        self.run.lapse()
        self.start(faults)

    def try_to(self, seq: int) -> Answer:
        """Dispatches once. A death also counts as an answer, and starts the next worker."""
        try:
            self.run.send(self.worker, seq)
            return self.worker.answer()
        except Died as death:
            self.deaths += 1
            self.replace()
            return "error", str(death)

    def run_to(self, seq: int) -> None:
        """Dispatches until `seq` is terminal."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            what, why = self.try_to(seq)
            if what in ("done", "failed"):
                return
            self.turned_away += 1
            time.sleep(0.02)
        raise AssertionError(f"seq {seq} did not end; last: {what}: {why}")

    def await_snapshot(self, seq: int) -> None:
        """Waits for a snapshot only if nothing happened to the worker."""
        if not self.deaths:
            self.run.await_snapshot(seq, self.worker)

    def await_uploads(self) -> None:
        """Waits until all transfers are in the object store.

        For a worker that died, the model is dispatched, as a sampler that misses weights does.
        """
        if not self.deaths:
            waits = self.run.waiting_uploads
            await_true(lambda: not self.worker.alive or not waits(), f"{waits()} are uploaded")
        deadline = time.monotonic() + WITHIN_S
        while self.run.waiting_uploads():
            assert time.monotonic() < deadline, f"in vain for {WITHIN_S} s: {self.run.waiting_uploads()} are uploaded"
            self.run_to(self.run.last)
            time.sleep(0.02)

    def close(self) -> None:
        try:
            self.worker.close()
        except Died:
            self.deaths += 1
