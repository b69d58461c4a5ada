"""Ids, Redis keys, object keys and contents, queues and tasks, records and manifests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from app import dispatch, ids
from app.domain.accounts import Key, Organisation, Project, User
from app.domain.checkpoints import CheckpointPrefix, FileEntry, Manifest
from app.domain.ops import LoraSpec
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session, ShmTransfer, Worker
from app.settings import Settings, hash_key
from app.signing import UrlSigner
from app.stores.objects import notes
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.folder import FolderStore
from app.stores.pages import LedgerPage, PageFiles
from app.stores.redis import keys
from app.stores.redis.records import dump
from workers.checkpoints import transfer
from workers.checkpoints.snapshot_upload import SnapshotFolder

ROOT = Path(__file__).parents[2]
MODEL, SAMPLER = "session:train:0", "session:sample:0"
_AT = 1_700_000_000.25
_PATH = f"tinker://{MODEL}/weights/a"


def goldens() -> dict[str, Any]:
    return {
        "ids": _ids(),
        "keys": _keys(),
        "celery": _celery(),
        "records": {name: [one.namespace, list(dump(one).items())] for name, one in RECORDS.items()},
        "manifests": {name: manifest.to_json().decode() for name, manifest in MANIFESTS.items()},
        "objects": _objects(),
    }


def _ids() -> dict[str, Any]:
    path = ids.TinkerPath.parse(_PATH)
    return {
        "model": ids.model_id("session", 3),
        "sampling session": ids.sampling_session_id("session", 3),
        "new session, characters": len(ids.new_session_id()),
        "session of a copy": ids.copy_session_id("project", "key"),
        "openai session": ids.openai_session_id("project"),
        "openai sampler": ids.openai_sampler_id("session", "base", "models/p"),
        "openai sampler of a base": ids.openai_sampler_id("session", "base", ""),
        "loss": ids.loss_id("session", 3),
        "unload": ids.unload_id(MODEL),
        "unloaded by": [ids.unloaded_by(f"{MODEL}:unload:0"), ids.unloaded_by(f"{MODEL}:0")],
        "hub": [ids.hub_id(name) for name in ("Qwen/Qwen3-0.6B", "a/b/c", "a/b:c", "a")],
        "prefixes": [
            ids.model_prefix("s"),
            ids.sampler_prefix("s"),
            ids.loss_prefix("s"),
            ids.checkpoint_path_prefix(MODEL),
        ],
        "session of": ids.session_of(MODEL),
        "request": [ids.request_id(MODEL, 3), ids.request_id(SAMPLER, 3)],
        "poll target": ids.poll_target(SAMPLER, 2),
        "target of": [ids.target_of(f"{SAMPLER}:{seq}") for seq in (0, 999_999_999, 2_000_000_001)],
        "seed": [ids.stable_seed(text) for text in ("", "session:sample:0:1")],
        "path": [str(path), path.model_id, path.kind, path.name, path.checkpoint_id],
        "checkpoint kinds": list(ids.CHECKPOINT_KINDS),
        "key of the settings": hash_key("tml-secret"),
        "secret of a key": hash_key("secret"),
        "signed url": UrlSigner("secret", "http://host:8000/").url("objects/a b/c", 1_700_000_000),
    }


def _keys() -> dict[str, str]:
    return {
        "done channel": keys.DONE_CHANNEL,
        "aborted channel": keys.ABORTED_CHANNEL,
        "taking calls": keys.TAKING_CALLS,
        "pending": keys.PENDING,
        "pending queue": keys.PENDING_QUEUE,
        "sessions heard": keys.SESSIONS_HEARD,
        "sessions ended": keys.SESSIONS_ENDED,
        "orphans": keys.ORPHANS,
        "pages": keys.PAGES,
        "storage measured": keys.STORAGE_MEASURED,
        "spill garbage": keys.SPILL_GARBAGE,
        "model": keys.model(MODEL),
        "journal": keys.journal(MODEL),
        "op": keys.op(f"{MODEL}:1"),
        "payload": keys.payload(f"{MODEL}:1"),
        "staged": keys.staged("name"),
        "future": keys.future(f"{MODEL}:1"),
        "stream": keys.stream(f"{SAMPLER}:1"),
        "lease": keys.lease(MODEL),
        "record": keys.record("namespace", "key"),
        "index": keys.index("namespace"),
        "page": keys.page(LedgerPage("usage", "project", 3)),
        "placed": keys.placed("sample.base"),
        "sampled": keys.sampled(SAMPLER),
        "completed": keys.completed(f"{SAMPLER}/0"),
    }


def _celery() -> dict[str, Any]:
    conf = dispatch.celery_app(Settings()).conf
    trains, samples = dispatch.train_queue, dispatch.sample_queue
    return {
        "kinds": list(dispatch.KINDS),
        "tasks": {kind: dispatch.task_name(kind) for kind in (*dispatch.KINDS, "drop_gradients", "skip", "unheard")},
        "tick": dispatch.TICK,
        "queues": [queue("Qwen/Qwen3-0.6B", full=full) for queue in (trains, samples) for full in (False, True)],
        "direct queue": dispatch.direct_queue(trains("base"), "trainer-1"),
        "settings": {name: conf[name] for name in _CONF},
        "worker": _worker(),
    }


# A separate process, because the module is the Celery application of every process that imports it.
_SHOW = """
import json
from workers.celery_app import app
app.loader.import_default_modules()
print(json.dumps({"name": app.main, "tasks": sorted(name for name in app.tasks if not name.startswith("celery."))}))
"""


def _worker() -> Any:
    """Tasks and queues of `celery -A workers.celery_app worker`."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        environ = {**os.environ, "TINSMITH_SETTINGS": config.name, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", _SHOW], env=environ, capture_output=True, check=True)
    return json.loads(done.stdout)


_CONF = (
    *("task_ignore_result", "task_serializer", "accept_content", "task_acks_late", "task_reject_on_worker_lost"),
    *("task_create_missing_queues", "worker_prefetch_multiplier", "task_send_sent_event", "worker_send_task_events"),
    *("worker_enable_remote_control", "control_queue_expires", "control_queue_ttl", "broker_transport_options"),
)

_LORA = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": False, "seed": 3, "alpha": 32.0}
RECORDS: dict[str, Any] = {
    "session": Session("me", _AT),
    "session, all set": Session("me", _AT, "expired", "mine", ["a"], {"k": {"deep": [1]}}, "user-1"),
    "model": Model("me", "session", "base", _AT),
    "model, all set": Model(
        "me", "session", "base", _AT, "ready", _LORA, {"k": 1}, True, True, "models/p", "tinker://copied", "key-1"
    ),
    "sampler": Sampler("me", "session", "base", _AT),
    "sampler, all set": Sampler("me", "session", "base", _AT, "tinker://path", "models/p", MODEL, True),
    "handover": ShmTransfer(MODEL, 3),
    "checkpoint": Checkpoint("me", MODEL, "weights", "base", "models/p", _AT, 123, _LORA, ["adapter.safetensors"]),
    "checkpoint, all set": Checkpoint(
        *("me", MODEL, "weights", "base", "models/p", _AT, 123, {}, ["model.safetensors.age"]),
        *(_AT + 60, {"k": "v"}, True, True, "key-1"),
    ),
    "loss": Loss("me", "session", _AT, "Y29udGVudA=="),
    "worker": Worker("trainer", "base", {}, {}, "http://x", _AT),
    "worker, all set": Worker(
        "sampler", "base", {"vocab_size": 5}, {"models": 1}, "http://x", _AT, False, "sample.base", 64, 256, 0.5
    ),
    "organisation": Organisation("org-1", "name", _AT, 2),
    "project": Project("project-1", "org-1", "name", _AT),
    "project, all set": Project("project-1", "org-1", "name", _AT, 2, {"tokens_per_s": 1.5, "live_models": None}),
    "user": User("user-1", "org-1", "a@b", _AT),
    "user, all set": User("user-1", "org-1", "a@b", _AT, {"project-1": "admin"}, True, 3),
    "key": Key("key-1", "user-1", "project-1", "digest", ["train"], "name", "note", _AT),
    "key, all set": Key(
        *("key-1", "user-1", "project-1", "digest", ["train", "sample", "manage"], "name", "note", _AT),
        *(_AT + 1, _AT + 2, 3, {"requests_per_s": 2}),
    ),
}

_FILES = {"adapter_model.safetensors": FileEntry(3, "ab" * 32)}
_SAVED = (MODEL, "me", "base", LoraSpec(8, seed=3), 3, 1, "2026-01-01T00:00:00.000+00:00", _FILES, 2, "a cpu")
MANIFESTS = {
    "checkpoint": Manifest(_PATH, "3-1", *_SAVED),
    "checkpoint, all set": Manifest(
        _PATH, "3-1", *_SAVED, has_optimizer=True, user_metadata={"k": "v"}, expires_at=_AT, critic=True, public=True
    ),
    "snapshot, full": Manifest("", "3-1", *_SAVED[:3], None, *_SAVED[4:]),
}


def _objects() -> dict[str, Any]:
    """Every kind of object, except those with random names (scripts.py); and a snapshot on a disk."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = FolderStore(root / "objects", "secret", "http://host")
        for record in RECORDS.values():
            if isinstance(record, Organisation | Project | User | Key):
                AccountFiles(store).add(record)
        PageFiles(store).add(LedgerPage("usage", "me", 472_222), {"training base key": "5"})
        PageFiles(store).add(LedgerPage("audit", "me", 472_222), {"id": "1700000000000 {}"})
        notes.note_move(store, "session", _AT, "other")
        prefix = str(CheckpointPrefix(MODEL, "weights", "a", 1, 3))
        notes.note(store, prefix, "expires_at", _AT, _AT + 60)
        notes.note(store, prefix, "public", _AT, True)
        (root / "sealed").mkdir()
        (root / "sealed" / "adapter_model.safetensors").write_bytes(b"abc")
        transfer.upload(store, prefix, root / "sealed", MANIFESTS["checkpoint"])
        place = CheckpointPrefix.parse(f"{prefix}/manifest.json")
        assert place is not None
        local = SnapshotFolder(root / "snapshots", "node").write(MODEL, 3, 1, lambda into: None)
        return {
            "stored": {key: store.read(key).decode() for key in store.list("")},
            "place": [str(place), place.model_id, place.kind, place.name, place.epoch, place.seq],
            "on disk": sorted(str(path.relative_to(root)) for path in (root / "objects").rglob("*") if path.is_file()),
            "snapshot on this machine": str(local.path.relative_to(root)),
        }
