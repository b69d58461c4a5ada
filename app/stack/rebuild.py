"""`tinsmith rebuild`: which servers it is about, and what it says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import redis

from app import settings as settings_module
from app.errors import SetupError
from app.services.rebuild import Rebuild, Restored
from app.settings import SETTINGS_VARIABLE, Settings
from app.stack import checks, config
from app.stack.config import Options
from app.stores.interfaces import ObjectStore
from app.stores.objects import create
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.oplog import RedisOpLog
from app.stores.redis.records import RedisRecords

_LOST = """\
not restored, as it was in the state server alone:
  calls behind a run's newest snapshot: the run goes on from there, with the seq after it
  results of calls and samples
  sampling sessions, and adapters saved for one only
  names, tags and metadata of sessions, and metadata of runs"""


def rebuild(options: Options) -> int:
    """Raises SetupError when a server cannot be reached, Unavailable when one fails on the way."""
    settings = _settings(options)
    checks.redis_server(settings.redis.url)
    objects = create(settings)
    print(f"from the object store {_store(settings)} into the state server {_shown(settings.redis.url)}", flush=True)
    try:
        restored = _rebuild(settings, objects)
    except redis.RedisError as error:
        raise SetupError(
            f"the state server {_shown(settings.redis.url)} failed: {error}; mend it and run this again"
        ) from None
    print(*report(restored), sep="\n")
    return 0


def _rebuild(settings: Settings, objects: ObjectStore) -> Restored:
    client = connect(settings.redis.url)
    oplog, lifecycle = RedisOpLog(client, settings.engine), RedisLifecycle(client, settings.engine)
    return Rebuild(oplog, lifecycle, RedisRecords(client, settings.engine), objects)()


def report(restored: Restored) -> Iterator[str]:
    runs = len(restored.runs) + len(restored.ended)
    yield f"restored {runs} runs and {len(restored.checkpoints)} checkpoints"
    for model_id, seq in restored.runs.items():
        yield f"  run {model_id} goes on behind seq {seq}"
    for model_id in restored.ended:
        yield f"  run {model_id} has checkpoints but no snapshot to go on from: its calls get 410"
    yield from (f"  checkpoint {path}" for path in restored.checkpoints)
    for model_id in restored.set_back:
        yield f"  run {model_id} was set back: what it saved since is there again, its calls since are lost"
    if restored.known:
        yield f"{restored.known} runs were there already and are as they were"
    if restored.expired:
        yield f"{restored.expired} checkpoints have expired"
    yield from (f"damaged, left out: {prefix}" for prefix in restored.damaged)
    yield _LOST


def _settings(options: Options) -> Settings:
    """Of the stack that runs on the data folder, unless a state server is given. As every process of a stack, it reads
    the file TINSMITH_SETTINGS names unless told otherwise."""
    named = os.environ.get(SETTINGS_VARIABLE)
    if options.config is None and named:
        options = replace(options, config=Path(named))
    settings = config.resolve(options, os.environ)
    if settings.redis.url:
        return settings
    written = settings.data_dir.expanduser() / "run" / "settings.toml"
    if not written.exists():
        raise SetupError(
            f"no stack has run on {settings.data_dir}: start `tinsmith up` on it first, or name the state server "
            "with --redis"
        )
    running = settings_module.load(written)
    if options.s3 is None:
        return running
    return running.model_copy(update={"store": running.store.model_copy(update={"url": options.s3})})


def _store(settings: Settings) -> str:
    return _shown(settings.store.url) if settings.store.url else str(settings.data_dir / "objects")


def _shown(url: str) -> str:
    """Without its password."""
    return url.rpartition("@")[2] or url
