"""`tinsmith rebuild`: which servers it is about, and what it says."""

from __future__ import annotations

import os
from collections.abc import Iterator

from app import settings as settings_module
from app.errors import SetupError
from app.services.rebuild import Rebuild, Restored
from app.settings import Settings
from app.stack import config, valkey
from app.stack.config import Options
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
  names, tags and metadata of sessions, and metadata of runs
a trainer's data folder on another machine may hold newer snapshots: remove DIR/snapshots there"""


def rebuild(options: Options) -> int:
    """Raises SetupError when a server cannot be reached, Unavailable when one fails on the way."""
    settings = _settings(options)
    if not valkey.answers(settings.redis.url):
        raise SetupError(f"the state server {_shown(settings.redis.url)} does not answer: start it first")
    client = connect(settings.redis.url)
    oplog, lifecycle = RedisOpLog(client, settings.engine), RedisLifecycle(client, settings.engine)
    restored = Rebuild(oplog, lifecycle, RedisRecords(client, settings.engine), create(settings))()
    for line in report(restored):
        print(line)
    return 0


def report(restored: Restored) -> Iterator[str]:
    runs = len(restored.runs) + len(restored.ended)
    yield f"restored {runs} runs and {len(restored.checkpoints)} checkpoints"
    for model_id, seq in restored.runs.items():
        yield f"  run {model_id} goes on behind seq {seq}"
    for model_id in restored.ended:
        yield f"  run {model_id} has checkpoints but no snapshot to go on from: its calls get 410"
    yield from (f"  checkpoint {path}" for path in restored.checkpoints)
    if restored.known:
        yield f"{restored.known} runs were there already and are as they were"
    if restored.expired:
        yield f"{restored.expired} checkpoints have expired"
    yield from (f"damaged, left out: {prefix}" for prefix in restored.damaged)
    yield _LOST


def _settings(options: Options) -> Settings:
    """Of the stack that runs on the data folder, unless a state server is given."""
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


def _shown(url: str) -> str:
    """Without its password."""
    return url.rpartition("@")[2] or url
