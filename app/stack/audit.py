"""`tinsmith admin audit`: the operator's look at the log, one entry a line."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime

from app.services.audit import AuditService
from app.services.books import Books
from app.stack import checks
from app.stack.config import Options
from app.stack.running import reached, settings_of
from app.stores.objects import create
from app.stores.objects.pages import PageFiles
from app.stores.redis.client import connect
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords


def show(options: Options, scope: str, day: date | None) -> int:
    """What was done in a project, or to an organisation, in a day (UTC; None: today). Raises SetupError, or Unavailable
    when a store is away."""
    settings = settings_of(options)
    checks.redis_server(settings.redis.url)
    client, objects = connect(settings.redis.url), create(settings)
    records = RedisRecords(client, settings.engine)
    log = AuditService(Books(RedisPages(client, settings.engine), PageFiles(objects)), records)
    with reached(settings):
        asked = day or datetime.fromtimestamp(records.now(), UTC).date()
        for entry in log.of([scope], "all", asked):
            print(entry["timestamp"], entry["event"], json.dumps(entry["event_details"]), sep="\t")
    return 0
