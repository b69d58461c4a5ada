"""`tinsmith backup` and `tinsmith restore`: the file, and what they say."""

from __future__ import annotations

from pathlib import Path

from app.errors import BadRequest, SetupError
from app.services import backup as backups
from app.stack import checks
from app.stack.config import Options
from app.stack.running import account_service, reached, settings_of, shown, store_name
from app.stores.objects import create
from app.stores.objects.files import whole_file


def backup(options: Options, file: Path) -> int:
    """Into a new file that only its owner can read. Raises SetupError, or Unavailable when the store is away."""
    settings = settings_of(options)
    if file.exists():
        raise SetupError(f"{file} exists: name a file that does not")
    objects = create(settings)
    try:
        with whole_file(file) as target:
            written = [target.write(line.encode() + b"\n") for line in backups.lines(objects)]
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from None
    print(f"{len(written) - 2} objects of {store_name(settings)} in {file}")
    return 0


def restore(options: Options, file: Path) -> int:
    """Raises SetupError for a file that is no whole backup, and nothing has changed then; Unavailable when a store is
    away, when it can be run again."""
    settings = settings_of(options)
    checks.redis_server(settings.redis.url)
    objects = create(settings)
    try:
        with file.open(encoding="utf-8") as text:
            count = backups.check(text)
        with file.open(encoding="utf-8") as text:
            restored = backups.restore(text, objects)
    except (OSError, UnicodeDecodeError, BadRequest) as error:
        raise SetupError(f"cannot restore {file}: {error}") from None
    print(f"of {count} objects {restored} were missing in {store_name(settings)}")
    with reached(settings):
        accounts, damaged = account_service(settings, objects).rebuild()
    print(f"restored {accounts} organisations, projects, users and keys in {shown(settings.redis.url)}")
    print(*(f"damaged, left out: {key}" for key in damaged), sep="\n", end="\n" if damaged else "")
    return 0
