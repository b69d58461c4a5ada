"""The actions of `tinsmith rebuild`, `backup` and `restore`, and their output."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from app.commands.connection import account_service, open_store, reached, settings_of, settings_of_store
from app.errors import BadRequest, SetupError
from app.services.recovery.backup import backup_lines, check_backup, restore_backup
from app.services.recovery.rebuild import Rebuild, Restored
from app.services.tenants import spending
from app.settings import Settings
from app.stack.config import Options
from app.stack.redaction import without_secrets
from app.stack.terminal import show
from app.stores.objects import create, folder_of, name_of
from app.stores.objects.base import ObjectStore, whole_file
from app.stores.pages import PageFiles
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.pages import Ledgers, RedisPages
from app.stores.redis.records import RedisRecords

_LOST = """\
not restored, because only the state server had it:
  calls after a run's newest snapshot: the run continues from the snapshot, with the next seq
  results of calls and samples
  usage and audit entries of the hours that were not yet in the object store
  sampling sessions, and adapters saved for one sampling session only
  names, tags and metadata of sessions, and metadata of runs"""


def rebuild(options: Options) -> int:
    """Rebuilds the state server's records. Raises SetupError when a server cannot be reached, Unavailable when one
    fails during the work."""
    settings = settings_of(options)
    objects = open_store(settings)
    state = without_secrets(settings.redis.url)
    show(f"from the object store {name_of(settings)} into the state server {state}")
    with reached(settings):
        # Accounts first: workers run meanwhile, and delete checkpoints by the limits of their project.
        accounts, damaged = account_service(settings, objects).rebuild()
        restored = _rebuild(settings, objects)
        refilled = _refill(settings, objects)
    restored.damaged.extend(damaged)
    show(*report(restored, accounts, refilled))
    return 0


def _rebuild(settings: Settings, objects: ObjectStore) -> Restored:
    client = connect(settings.redis.url)
    oplog, lifecycle = RedisOpLog(client, settings.engine), RedisLifecycle(client, settings.engine)
    return Rebuild(oplog, lifecycle, RedisRecords(client, settings.engine), objects)()


def _refill(settings: Settings, objects: ObjectStore) -> int:
    client = connect(settings.redis.url)
    ledgers = Ledgers(RedisPages(client, settings.engine), PageFiles(objects))
    return spending.refill(ledgers, datetime.fromtimestamp(RedisRecords(client).now(), UTC).date())


def report(restored: Restored, accounts: int, refilled: int) -> Iterator[str]:
    runs = len(restored.runs) + len(restored.ended)
    yield f"restored {runs} runs and {len(restored.checkpoints)} checkpoints"
    for model_id, seq in restored.runs.items():
        yield f"  run {model_id} continues after seq {seq}"
    for model_id in restored.ended:
        yield f"  run {model_id} has checkpoints but no snapshot to continue from: its calls get 410"
    yield from (f"  checkpoint {path}" for path in restored.checkpoints)
    for model_id in restored.set_back:
        yield f"  run {model_id} was set back: its later checkpoints are restored, its later calls are lost"
    if accounts:
        yield f"restored {accounts} organisations, projects, users and keys"
    if refilled:
        yield f"refilled this month's spending of {refilled} projects from their kept usage"
    if restored.known:
        yield f"{restored.known} runs were not missing and stay as they are"
    if restored.expired:
        yield f"{restored.expired} checkpoints have expired"
    yield from (f"damaged, not restored: {prefix}" for prefix in restored.damaged)
    if restored.runs or restored.ended or restored.checkpoints or restored.set_back or accounts:
        yield from _LOST.split("\n")


def backup(options: Options, file: Path) -> int:
    """Writes a backup to a new file that only its owner can read. It needs the object store alone.

    Raises SetupError, also for a damaged object and for a store without accounts, or Unavailable when the store is
    away.
    """
    settings = settings_of_store(options)
    if file.exists():
        raise SetupError(f"{file} already exists: name a new file")
    folder = folder_of(settings)
    if folder is not None and not folder.is_dir():
        raise _nothing_in(settings)
    objects = create(settings)
    try:
        with whole_file(file) as target:
            written = [target.write(line.encode() + b"\n") for line in backup_lines(objects)]
            count = len(written) - 2  # without the head and the last line
            if not count:
                raise _nothing_in(settings)
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from None
    show(f"wrote {count} objects of {name_of(settings)} to {file}")
    return 0


def _nothing_in(settings: Settings) -> SetupError:
    return SetupError(
        f"no accounts, usage or audit entries are in {name_of(settings)}, so there is nothing to back up; are "
        "--data-dir and --s3 right?"
    )


def restore(options: Options, file: Path) -> int:
    """Restores a backup. Raises SetupError for a file that is not a complete backup; then nothing has changed. Raises
    Unavailable when a store is away; then the command can be run again."""
    settings = settings_of(options)
    try:
        with file.open(encoding="utf-8") as text:
            count = check_backup(text)
        objects = open_store(settings)
        with file.open(encoding="utf-8") as text:
            restored = restore_backup(text, objects)
    except OSError as error:
        raise SetupError(f"cannot restore {file}: {error.strerror}") from None
    except (UnicodeDecodeError, BadRequest) as error:
        raise SetupError(f"cannot restore {file}: {error}") from None
    show(f"of {count} objects {restored} were missing in {name_of(settings)}")
    with reached(settings):
        accounts, damaged = account_service(settings, objects).rebuild()
        refilled = _refill(settings, objects)
    show(f"restored {accounts} organisations, projects, users and keys in {without_secrets(settings.redis.url)}")
    show(f"refilled this month's spending of {refilled} projects")
    show(*(f"damaged, not restored: {key}" for key in damaged))
    return 0
