"""The report of `tinsmith logs`: all that is known of one call, and the lines that name it in the logs of a stack."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import redis
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app import ids
from app.commands.connection import connected, settings_of
from app.errors import TinsmithError
from app.stack.config import Options
from app.stack.terminal import show_json, visible
from app.stores.redis import keys
from app.stores.redis.client import found_fields, read_hash, text_fields

_OWN_FIELDS = ("time", "level", "logger", "message", "traceback")
_STAGES = ("waited_s", "run_s", "commit_s")
_NAMES = ("request_id", "model_id", "seq")
_CONTENT_END = (".log.1", ".log")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a process's log. `fields`: the others of a JSON line. A line in another form has only a message."""

    process: str
    message: str
    time: str = ""
    level: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class CallReport:
    """A call. `state`: waiting, running, done, failed, refused, or expired once only log lines are left of it. Times
    are unix seconds by the state server's clock, None where they are not known. `attempts` counts the workers that died
    of it. `stages`: seconds by name, as the worker that ended it logged them."""

    request_id: str
    kind: str
    parent: str
    base_model: str
    project: str
    state: str
    error: str
    category: str
    admitted: float | None
    ended: float | None
    attempts: int | None
    worker: str
    stages: Mapping[str, float]
    lines: list[LogLine]


def logs(options: Options, request_id: str, *, as_json: bool) -> int:
    """Prints the report of a call. Raises TinsmithError if nothing is known of it."""
    settings = settings_of(options)
    folder = settings.data_dir.expanduser() / "logs"
    with connected(settings) as client:
        report = read(client, folder, request_id)
    if as_json:
        show_json(asdict(report))
    else:
        _print(report, folder)
    return 0


def read(client: redis.Redis, folder: Path, request_id: str) -> CallReport:
    """Reads all that is known of a call. Raises TinsmithError for an unknown call, and redis.RedisError."""
    if not ids.is_request_id(request_id):
        raise TinsmithError(f"{request_id!r} is not the id of a call: it has the form <run or sampler>:<number>")
    future = _future(client, request_id)
    op = text_fields(read_hash(client, keys.op(request_id)))
    lines = sorted(_lines(folder, request_id), key=lambda line: line.time)
    if not (future or op or lines):
        raise TinsmithError(
            f"there is no call {request_id!r}: give the id of a future, <run or sampler>:<number>; of a call whose "
            "result has expired, only the logs in the data folder are left"
        )
    parent = ids.parent_of(request_id)
    record = _parent(client, parent)
    runner = op.get("runner", "")
    is_running = bool(runner) and _holder(client, request_id, parent) == runner
    error, category = _error(future)
    return CallReport(
        request_id=request_id,
        kind=future.get("kind") or op.get("kind", ""),
        parent=parent,
        base_model=json.loads(record.get("base_model", '""')),
        project=future.get("owner") or json.loads(record.get("owner", '""')),
        state=_state(future, is_running),
        error=error,
        category=category,
        admitted=_seconds(future.get("admitted") or op.get("admitted")),
        ended=_seconds(future.get("ended")),
        attempts=int(op["attempts"]) if "attempts" in op else None,
        worker=ids.node_of(runner),
        stages=_stages(lines),
        lines=lines,
    )


def _future(client: redis.Redis, request_id: str) -> dict[str, str]:
    """The fields of the future; of its result only an error's text, since others are as large as they come."""
    names = ["kind", "owner", "state", "admitted", "ended", "refused"]
    fields = found_fields(names, client.hmget(keys.future(request_id), names))
    if fields.get("state") == "failed":
        body = cast("bytes | None", client.hget(keys.future(request_id), "body"))
        fields["body"] = (body or b"").decode(errors="replace")
    return fields


def _parent(client: redis.Redis, parent: str) -> dict[str, str]:
    """The record of the run or the sampler that the call is for."""
    namespace = "samplers" if ":sample:" in parent else "models"
    return text_fields(read_hash(client, keys.record(namespace, parent)))


def _holder(client: redis.Redis, request_id: str, parent: str) -> str:
    """The worker with the lease: on a sampling request, or on the run of a training call."""
    id_ = request_id if ":sample:" in parent else parent
    holder = cast("bytes | None", client.get(keys.lease(id_)))
    return (holder or b"").decode()


def _state(future: Mapping[str, str], is_running: bool) -> str:
    if "refused" in future:
        return "refused"
    if future.get("state") == "pending":
        return "running" if is_running else "waiting"
    return future.get("state", "expired")


def _error(future: Mapping[str, str]) -> tuple[str, str]:
    """The text of the error and its category; empty for a call that did not fail."""
    if "refused" in future:
        return future["refused"], "user"
    if future.get("state") != "failed":
        return "", ""
    with suppress(ValueError):
        body = json.loads(future.get("body", ""))
        return str(body.get("error", "")), str(body.get("category", ""))
    return "its text is in the result, which is not kept here", ""


def _seconds(ms: str | None) -> float | None:
    return int(ms) / 1000 if ms else None


def _stages(lines: list[LogLine]) -> dict[str, float]:
    """The times of the last attempt."""
    found = [line.fields for line in lines if "run_s" in line.fields]
    return {name: found[-1][name] for name in _STAGES if name in found[-1]} if found else {}


def _lines(folder: Path, request_id: str) -> Iterator[LogLine]:
    """The lines of the logs that name the call. The content of a large log has moved to `<log>.1`."""
    named = re.compile(rb"(?<![\w-])" + re.escape(request_id.encode()) + rb"(?![\w-]|:[0-9])")
    for end in _CONTENT_END:
        for file in sorted(folder.glob(f"*{end}")):
            with suppress(OSError), file.open("rb") as log:
                yield from (_line(file.name.removesuffix(end), raw) for raw in log if named.search(raw))


def _line(process: str, raw: bytes) -> LogLine:
    text = raw.decode(errors="replace").strip()
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            known = {name: str(found.get(name, "")) for name in ("message", "time", "level", "traceback")}
            rest = {name: value for name, value in found.items() if name not in _OWN_FIELDS}
            return LogLine(process, **known, fields=rest)
    return LogLine(process, text)


def _print(report: CallReport, folder: Path) -> None:
    console = Console(highlight=False)
    console.print(_facts(report))
    for line in report.lines:
        more = "".join(f" {name}={value}" for name, value in line.fields.items() if name not in _NAMES)
        head = " ".join(part for part in (line.time, line.process, line.level) if part)
        console.print(Text(f"\n{visible(head)}\n  {visible(line.message + more)}"))
        for each in line.traceback.splitlines():
            console.print(Text(f"  {visible(each)}"))
    if not report.lines:
        console.print(Text(f"\nno line in {folder} names it", overflow="fold"))


def _facts(report: CallReport) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    state = f"{report.state} ({report.category})" if report.category else report.state
    rows = {
        "call": report.request_id,
        "kind": report.kind,
        "sampler" if ":sample:" in report.parent else "run": report.parent,
        "base model": report.base_model,
        "project": report.project,
        "state": state,
        "error": report.error,
        "admitted": _time(report.admitted),
        "ended": _time(report.ended),
        "stages": ", ".join(f"{name.removesuffix('_s')} {seconds:.3f} s" for name, seconds in report.stages.items()),
        "attempts": "" if report.attempts is None else f"{report.attempts} workers died while they ran it",
        "worker": report.worker,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(visible(value)))
    return table


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="milliseconds")
