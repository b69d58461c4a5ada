"""`tinsmith status` and `tinsmith top`: workers, runs and waiting calls of a stack, as tables or as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlsplit

import redis
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.commands.connection import connected, settings_of
from app.domain.progress import NEWEST_POINTS, described
from app.domain.records import Model, Worker
from app.services.views import size_text
from app.settings import Settings
from app.stack.config import Options
from app.stack.terminal import show_json, visible
from app.stores.redis.backlog import RedisBacklog
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, load

_MOST_WAITING = 10_000
_EVERY_S = 1.0
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker that sends heartbeats. `models`: the runs that a trainer holds, the adapters that a sampler has loaded.
    `call_s`: average seconds between the ends of calls while there was work, 0 before the first. `metrics_url`: its
    Prometheus metrics, as its own machine names them."""

    name: str
    role: str
    base_model: str
    healthy: bool
    devices: list[str]
    models: int
    call_s: float
    up_s: float
    metrics_url: str


@dataclass(frozen=True, slots=True)
class RunState:
    """A training run. `calls` have ended, and `waiting` calls have not. `worker` holds the run in memory; empty if none
    does. `idle_s`: since its last call arrived. `loss` of a token in the newest batch; None before the first.
    `tokens_per_s`: None while it pauses. `progress` has these in words; empty before the first call."""

    id: str
    base_model: str
    kind: str
    project: str
    state: str
    calls: int
    waiting: int
    running: bool
    worker: str
    idle_s: float
    steps: int = 0
    trained_tokens: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    progress: str = ""


@dataclass(frozen=True, slots=True)
class StackState:
    """`runs`: the newest ones first by their last call; `more_runs` others are left out. `samples`: unfinished sampling
    requests by base model. Memory in bytes is that of the state server; its limit is 0 for none."""

    workers: list[WorkerState]
    runs: list[RunState]
    more_runs: int
    samples: dict[str, int]
    memory_bytes: int
    memory_limit_bytes: int


def status(options: Options, *, runs: int, as_json: bool) -> int:
    """Prints the state once."""
    settings = settings_of(options)
    with connected(settings) as client:
        found = read(client, settings, runs)
    if as_json:
        show_json(asdict(found))
    else:
        Console(highlight=False).print(drawn(found))
    return 0


def top(options: Options, *, runs: int) -> int:
    """Draws the state every second until it is interrupted."""
    settings = settings_of(options)
    live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), connected(settings) as client, live:
        while True:
            live.update(drawn(read(client, settings, runs)), refresh=True)
            time.sleep(_EVERY_S)
    return 0


def read(client: redis.Redis, settings: Settings, most_runs: int) -> StackState:
    """Reads the state. Raises redis.RedisError."""
    records = RedisRecords(client)
    now = records.now()
    unfinished = RedisBacklog(client, settings.engine).unfinished(_MOST_WAITING)
    waiting = {line.model_id: (line.waiting, line.running) for line in unfinished.models}
    runs = sorted(_runs(records, RedisOpLog(client, settings.engine), waiting, now), key=lambda run: run.idle_s)
    held = Counter(run.worker for run in runs)
    shown = _with_progress(records, runs[:most_runs], now)
    workers = [(node, load(Worker, fields)) for node, fields in records.list(Worker.namespace)]
    memory = client.info("memory")
    return StackState(
        workers=[_worker(node, worker, held[node], now) for node, worker in workers],
        runs=shown,
        more_runs=max(0, len(runs) - most_runs),
        samples=dict(Counter(sample.queue.partition(".")[2] for sample in unfinished.samples)),
        memory_bytes=int(memory["used_memory"]),
        memory_limit_bytes=int(memory["maxmemory"]),
    )


def _worker(node: str, worker: Worker, runs: int, now: float) -> WorkerState:
    return WorkerState(
        name=node,
        role=worker.role,
        base_model=worker.base_model,
        healthy=worker.healthy,
        devices=list(worker.describe.get("devices", ())),
        models=runs + len(worker.describe.get("adapters", ())),
        call_s=worker.pace_s,
        up_s=max(0.0, now - worker.started),
        metrics_url=worker.metrics_url,
    )


def _runs(
    records: RedisRecords, oplog: RedisOpLog, waiting: Mapping[str, tuple[int, bool]], now: float
) -> Iterator[RunState]:
    stored = [(id_, fields, load(Model, fields)) for id_, fields in records.list(Model.namespace)]
    found = [each for each in stored if "ended" not in each[1] and not each[2].copied_from]
    holders = oplog.holders([model_id for model_id, _, _ in found])
    for (model_id, fields, model), holder in zip(found, holders, strict=True):
        calls, running = waiting.get(model_id, (0, False))
        yield RunState(
            id=model_id,
            base_model=model.base_model,
            kind=model.kind,
            project=model.owner,
            state=model.state,
            calls=int(fields.get("applied", -1)) + 1,
            waiting=calls,
            running=running,
            worker=holder,
            idle_s=max(0.0, now - float(fields.get("last_request", 1000 * model.created)) / 1000),
        )


def _with_progress(records: RedisRecords, runs: list[RunState], now: float) -> list[RunState]:
    found = records.progress([run.id for run in runs], NEWEST_POINTS)
    return [
        replace(
            run,
            steps=progress.steps,
            trained_tokens=progress.trained_tokens,
            loss=progress.loss,
            tokens_per_s=progress.tokens_per_s(now),
            progress=described(progress, now) if progress.points else "",
        )
        for run, progress in zip(runs, found, strict=True)
    ]


def drawn(found: StackState) -> Group:
    """The tables, at most 80 columns wide where the names are short."""
    limit = f" of {size_text(found.memory_limit_bytes)}" if found.memory_limit_bytes else ""
    parts: list[Table | Text] = [_workers(found.workers), *_metrics(found.workers)]
    for base in sorted({run.base_model for run in found.runs} | found.samples.keys()):
        own = [run for run in found.runs if run.base_model == base]
        samples = found.samples.get(base, 0)
        parts += [Text(f"\n{visible(base)}: {samples} unfinished samples"), _run_table(own)]
    if found.more_runs:
        parts.append(Text(f"and {found.more_runs} other runs; --runs N shows more"))
    parts.append(Text(f"\nstate server: {size_text(found.memory_bytes)}{limit} in use"))
    return Group(*parts)


def _workers(workers: list[WorkerState]) -> Table:
    table = _table("worker", "state", "models", "s/call", "up", "devices", "base model")
    for one in sorted(workers, key=lambda worker: worker.name):
        state = "healthy" if one.healthy else "stalled"
        pace = f"{one.call_s:.2f}" if one.call_s else _UNKNOWN
        cells = (_short(one.name), state, str(one.models), pace, _duration(one.up_s), ",".join(one.devices))
        table.add_row(*(Text(visible(cell)) for cell in (*cells, one.base_model)))
    return table


def _metrics(workers: list[WorkerState]) -> Iterator[Text]:
    """The address of each worker's metrics in one text, which is wrapped between them."""
    named = sorted((_short(one.name), urlsplit(one.metrics_url).netloc) for one in workers if one.metrics_url)
    if named:
        yield Text(visible(f"metrics: {', '.join(f'{name} {address}' for name, address in named)}"))


def _run_table(runs: list[RunState]) -> Table:
    table = _table("run", "kind", "calls", "wait", "worker", "idle")
    for run in runs:
        held = _short(run.worker) or _UNKNOWN
        where = f"{held} *" if run.running else held
        cells = (run.kind, str(run.calls), str(run.waiting), where, _duration(run.idle_s))
        name = visible(run.id) + (f"\n  {run.progress}" if run.progress else "")
        table.add_row(Text(name), *(Text(visible(cell)) for cell in cells))
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold" if header == "run" else "ellipsis", no_wrap=header != "run")
    return table


def _short(node: str) -> str:
    """The name of a worker without its machine."""
    return node.partition("@")[0]


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
