"""A state of a journal, its clients and its workers, and the form in which two states are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from app.stores.redis import keys
from app.stores.redis.types import Entry, Lease

NODES = "node1", "node2"
BACKWARD, STEP, FAILING, REFUSED = "forward_backward", "optim_step", "fails", "lost_batch"
_TIMES = {"admitted", "last_request", "ended"}
_TIMED_SETS = {"tinsmith:pending", "tinsmith:sessions_heard"}

History = tuple[str, ...]
"""The names of the Ops that a model has applied, in order. An Op that failed is not among them."""


@dataclass(frozen=True, slots=True)
class Call:
    """A client's call: `kind` of the Op at `seq` of `model`. A call of kind FAILING is a forward_backward that fails. A
    call of kind REFUSED is refused at its admission."""

    model: str
    seq: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.model}:{self.seq}:{self.kind}"

    @property
    def journalled(self) -> str:
        return BACKWARD if self.kind == FAILING else self.kind


@dataclass(frozen=True, slots=True)
class Memory:
    """A worker's memory of one model: its lease, what it has applied (None until it is restored), the Op that runs."""

    lease: Lease
    applied: int
    history: History | None = None
    running: Entry | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    node: str
    boot: int = 1
    memory: Mapping[str, Memory] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.node}/{self.boot}"

    def with_memory(self, model: str, memory: Memory | None) -> Worker:
        others = {name: kept for name, kept in self.memory.items() if name != model}
        return replace(self, memory=others if memory is None else {**others, model: memory})


@dataclass(frozen=True, slots=True)
class Spectator:
    """The true state of a model, which the promises are checked against: its rightful owner ("" for none), the newest
    grant, the commits, and the Ops that must fail because a gradient before them is lost."""

    owner: str = ""
    granted: tuple[str, int] = ("", 0)
    commits: tuple[str, ...] = ()
    history: History = ()
    admitted: frozenset[int] = frozenset()
    doomed: Mapping[int, str] = field(default_factory=dict)
    forgotten: int = 0
    """The number of results that have expired; the first ones expire first."""


@dataclass(frozen=True, slots=True)
class State:
    server: bytes
    workers: tuple[Worker, ...]
    seen: Mapping[str, Spectator]
    lapses: int
    deaths: int


def canonical(state: State) -> int:
    """The state's hash. Two states are the same one when they differ in times alone, in numbers of epochs in the same
    order, or in the nodes' names."""
    return hash(min(_text(state), _text(_with_nodes_exchanged(state))))


def _text(state: State) -> str:
    epochs: dict[str, list[int]] = {}
    for model, seen in state.seen.items():
        leases = [w.memory[model].lease.epoch for w in state.workers if model in w.memory]
        epochs[model] = sorted({seen.granted[1], *leases})
    server = sorted(
        (key, kind, _without_times(key, kind, held, epochs))
        for key, kind, held in msgpack.unpackb(state.server, raw=False)
    )
    workers = [(w.name, [(m, _without_epoch(w.memory[m], epochs[m])) for m in sorted(w.memory)]) for w in state.workers]
    seen = [
        (
            m,
            s.owner,
            s.granted[0],
            epochs[m].index(s.granted[1]),
            s.commits,
            sorted(s.admitted),
            sorted(s.doomed.items()),
            s.forgotten,
        )
        for m, s in sorted(state.seen.items())
    ]
    return repr((server, workers, seen, state.lapses, state.deaths))


def _with_nodes_exchanged(state: State) -> State:
    first, second = state.workers
    seen = {
        model: replace(s, owner=_exchanged(s.owner), granted=(_exchanged(s.granted[0]), s.granted[1]))
        for model, s in state.seen.items()
    }
    return replace(
        state,
        server=_exchanged(state.server.decode("latin-1")).encode("latin-1"),
        workers=(replace(second, node=first.node), replace(first, node=second.node)),
        seen=seen,
    )


def _exchanged(text: str) -> str:
    first, second = (f"{node}/" for node in NODES)
    return text.replace(first, "node0/").replace(second, first).replace("node0/", second)


def _without_epoch(memory: Memory, epochs: list[int]) -> tuple[Any, ...]:
    lease, entry = memory.lease, memory.running
    running = entry and (entry.seq, entry.doomed, entry.attempts)
    return epochs.index(lease.epoch), lease.snapshot, lease.applied, memory.applied, memory.history, running


def _without_times(key: str, kind: str, held: Any, epochs: Mapping[str, list[int]]) -> Any:
    if kind == "set":
        return sorted(held)
    if kind == "zset":
        return sorted(held[::2]) if key in _TIMED_SETS else held
    if kind != "hash":
        return held
    fields = {name: value for name, value in pairs(held).items() if name not in _TIMES}
    for model, known in epochs.items():
        if key == keys.model(model):
            fields["epoch"] = str(known.index(int(fields["epoch"])) if int(fields["epoch"]) in known else -1)
    if "former" in fields:
        fields["former"] = str(sorted((boot, ms > 0) for boot, ms in json.loads(fields["former"]).items()))
    return sorted(fields.items())


def pairs(flat: Any) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
