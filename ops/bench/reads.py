"""Reads a second of one API process, and the processor time of each, beside bare Flask with the same settings.

The client only sends prepared bytes and looks for the end of each answer. It takes some 0.05 ms a read of its own core.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import socket
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import tomli_w

from app import ids
from app import settings as settings_module
from app.domain.records import Checkpoint
from app.domain.results import Result
from app.settings import SETTINGS_VARIABLE
from app.stack import ports
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import OwnedElsewhere
from ops.bench import api_body, held_polls, servers, side, timing
from ops.bench.client import Client
from ops.bench.report import Goal, Outcome

_CONNECTIONS = 32
_SECONDS, _ROUNDS = 1.0, 7
_RUNS = _CHECKPOINTS = 10
_READS_GOAL, _TIMES_GOAL = 2000.0, 3.5
_WIDE = "get_info, a process for each core"
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]+)\r\n", re.IGNORECASE)
Figures = Mapping[str, float]


def run(folder: Path, seconds: float = _SECONDS, rounds: int = _ROUNDS) -> Outcome:
    with servers.prepared_api(folder, api_body.INFO) as api, ExitStack() as stack:
        bare, wide = _bare(api), _with(api, processes=side.CORES)
        groups = [stack.enter_context(servers.running_api(each)) for each in (bare, api, wide)]
        reads = _reads(api)
        sides = {
            **_sides(bare, groups[0], _bare_reads(), seconds),
            **_sides(api, groups[1], reads, seconds),
            **_sides(wide, groups[2], {_WIDE: reads["get_info"]}, seconds),
        }
        timing.alternate(1, sides)
        found = {name: _figures(each) for name, each in timing.alternate(rounds, sides).items()}
    figures = {"connections": _CONNECTIONS, "runs": _RUNS, "checkpoints": _CHECKPOINTS, "reads": found}
    return Outcome(figures, tuple(_goals(found)))


def _goals(found: Mapping[str, Figures]) -> Iterator[Goal]:
    bare = found["bare POST"]["least_server_ms"]  # 0 if all rounds were shorter than a step of its count
    times = found["get_info"]["least_server_ms"] / bare if bare else math.nan
    yield Goal("get_info: processor time, of bare Flask's", times, "at_most", _TIMES_GOAL, "x")
    yield Goal(_WIDE, found[_WIDE]["a_second"], "at_least", _READS_GOAL, "a second")


def _bare(api: servers.Api) -> servers.Api:
    """The bare application, with gunicorn's own threaded worker."""
    other = _with(api)
    argv = (*other.command.argv[:-1], "-k", "gthread", "ops.bench.bare_flask:application")
    return replace(other, command=replace(other.command, argv=argv))


def _with(api: servers.Api, **options: int) -> servers.Api:
    """The same API on another port, with these settings of its section."""
    settings = tomllib.loads(api.settings_file.read_text())
    settings["api"] |= {"port": ports.free_port("127.0.0.1", 0), **options}
    file = api.settings_file.with_name(f"settings-{settings['api']['port']}.toml")
    file.write_text(tomli_w.dumps(settings))
    command = replace(api.command, environ={SETTINGS_VARIABLE: str(file)})
    return replace(api, settings=settings_module.load(file), settings_file=file, command=command)


def _bare_reads() -> Mapping[str, bytes]:
    return {"bare GET": _request("GET", "healthz"), "bare POST": _request("POST", "get_info", {"model_id": "m"})}


def _reads(api: servers.Api) -> Mapping[str, bytes]:
    """A request of each kind, for records that this makes: runs, of which one has checkpoints and a finished future."""
    with closing(Client(api.url)) as client, connect(api.settings.redis.url) as redis:
        (model_id, future), *_ = [client.admit_model(api_body.INFO.name, 8) for _ in range(_RUNS)]
        oplog, records = RedisOpLog(redis, api.settings.engine), RedisRecords(redis)
        lease = oplog.acquire(model_id, "node/bench")
        assert not isinstance(lease, OwnedElsewhere)
        oplog.commit(lease, 0, Result(json.dumps({"type": "create_model", "model_id": model_id}).encode()), [])
        for number in range(_CHECKPOINTS):
            path = ids.TinkerPath(model_id, "weights", f"step-{number}")
            where = (held_polls.PROJECT, model_id, "weights", api_body.INFO.name, "prefix")
            made = Checkpoint(*where, time.time(), 1, {"rank": 8}, ["adapter_model.safetensors"])
            records.put_new(Checkpoint.namespace, str(path), dump(made))
    run, session = f"training_runs/{model_id}", f"sessions/{ids.session_of(model_id)}"
    return {
        "healthz": _request("GET", "healthz"),
        "get_info": _request("POST", "get_info", {"model_id": model_id}),
        "get_session": _request("GET", session),
        "training run": _request("GET", run),
        "training runs": _request("GET", "training_runs"),
        "checkpoints of a run": _request("GET", f"{run}/checkpoints"),
        "checkpoints": _request("GET", "checkpoints"),
        "finished future": _request("POST", "retrieve_future", {"request_id": future}),
    }


def _request(method: str, path: str, body: Mapping[str, str] | None = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} /api/v1/{path} HTTP/1.1", "Host: 127.0.0.1", f"X-API-Key: {servers.API_KEY}", "Accept: */*"]
    if content:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join((*head, "", "")).encode() + content


def _sides(
    api: servers.Api, group: int, requests: Mapping[str, bytes], seconds: float
) -> Mapping[str, Callable[[], Figures]]:
    def measured(request: bytes) -> Figures:
        with _connected(api.settings.api.port) as sockets:
            before = _cpu_s(group)
            began = time.perf_counter()
            reads = _drive(sockets, request, until=began + seconds)
            passed = time.perf_counter() - began
            return {"a_second": reads / passed, "server_ms": 1000 * (_cpu_s(group) - before) / reads}

    return {name: partial(measured, request) for name, request in requests.items()}


@contextmanager
def _connected(port: int) -> Iterator[Sequence[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(_CONNECTIONS)]


def _drive(sockets: Sequence[socket.socket], request: bytes, until: float) -> int:
    """The answers until then, and the first one whenever it comes. Every connection has one request at a time. Raises
    RuntimeError for another answer than 200."""
    answers, arrived, poll = 0, {each.fileno(): (each, bytearray()) for each in sockets}, select.epoll()
    with closing(poll):
        for each in sockets:
            poll.register(each, select.EPOLLIN)
            each.sendall(request)
        while not answers or time.perf_counter() < until:
            for fd, _ in poll.poll(1.0):
                connection, data = arrived[fd]
                data += connection.recv(2**16)
                if is_whole(data):
                    answers += 1
                    data.clear()
                    connection.sendall(request)
    return answers


def is_whole(answer: bytearray) -> bool:
    head = answer.find(b"\r\n\r\n")
    if head < 0 and answer:
        return False
    length = _LENGTH.search(answer)
    if not answer.startswith(b"HTTP/1.1 200 ") or length is None:
        raise RuntimeError(f"a read was answered with {bytes(answer[:500])!r}")
    return len(answer) >= head + 4 + int(length[1])


def _cpu_s(group: int) -> float:
    """The processor time of a group of processes, which Linux counts in steps of 10 ms."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _figures(rounds: Sequence[Figures]) -> Figures:
    """The medians, and the least processor time of a round: other work on the machine only ever adds to it."""
    found = {name: median(each[name] for each in rounds) for name in rounds[0]}
    return {**found, "least_server_ms": min(each["server_ms"] for each in rounds)}
