"""Visits every interleaving of clients and workers at one journal: the real scripts, on a real server.

A state is all of the server's keys, the memory of each worker, and what a spectator knows. From each new state the
explorer takes each possible step, and puts the server back before the next one. Times are left out of a state, and
epochs count by their order alone, so the states are finite. A lease lapses only by a step of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import msgpack
import redis

from app import ids
from app.domain.records import Model
from app.domain.results import Result
from app.errors import BadRequest, Fenced
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import OwnedElsewhere
from tests.property.explored_state import (
    BACKWARD,
    FAILING,
    NODES,
    REFUSED,
    STEP,
    Call,
    History,
    Memory,
    Spectator,
    State,
    Worker,
    canonical,
    pairs,
)

OWNER = "me"
_READ = """
local readers = {
  string = function(key) return redis.call('GET', key) end,
  hash = function(key) return redis.call('HGETALL', key) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  set = function(key) return redis.call('SMEMBERS', key) end,
}
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  found[#found + 1] = {key, kind, readers[kind](key)}
end
return cmsgpack.pack(found)
"""
_WRITE = """
redis.call('FLUSHDB')
local writers = {
  string = function(key, held) redis.call('SET', key, held) end,
  hash = function(key, held) redis.call('HSET', key, unpack(held)) end,
  zset = function(key, held)
    for i = 1, #held, 2 do redis.call('ZADD', key, held[i + 1], held[i]) end
  end,
  set = function(key, held) redis.call('SADD', key, unpack(held)) end,
}
for _, entry in ipairs(cmsgpack.unpack(ARGV[1])) do writers[entry[2]](entry[1], entry[3]) end
"""


class Broken(AssertionError):
    """A promise is broken; the message has the steps that led there."""


Step = tuple[str, ...]


class Explorer:
    """All interleavings of `calls` with two workers, of which leases lapse `lapses` times and processes die `deaths`
    times. With `forgets`, results expire. `visit` raises Broken at the first broken promise."""

    def __init__(
        self, client: redis.Redis, calls: tuple[Call, ...], lapses: int = 0, deaths: int = 0, forgets: bool = False
    ) -> None:
        self._redis = client
        self._oplog = RedisOpLog(client, EngineSettings(lease_s=86_400))
        self._read, self._write = client.register_script(_READ), client.register_script(_WRITE)
        self._calls = {call.name: call for call in calls}
        self._models = tuple(dict.fromkeys(call.model for call in calls))
        self._lapses, self._deaths, self._forgets = lapses, deaths, forgets
        self._on_server = b""

    def visit(self) -> int:
        """Visits all states; returns how many there are."""
        start = self._start()
        known = {canonical(start)}
        waiting: deque[tuple[State, tuple[Step, ...]]] = deque([(start, ())])
        while waiting:
            state, path = waiting.popleft()
            ends, own = True, canonical(state)
            for step in self._steps(state):
                after = self._after(state, step, (*path, step))
                form = canonical(after)
                ends = ends and form == own
                if form not in known:
                    known.add(form)
                    waiting.append((after, (*path, step)))
            if ends:
                self._check_nothing_is_lost(state, path)
        return len(known)

    def _start(self) -> State:
        self._redis.flushdb()
        for model in self._models:
            self._oplog.create_model(model, dump(Model(OWNER, "session", "base", 0.0)))
        workers = tuple(Worker(node) for node in NODES)
        return State(self._served(), workers, {m: Spectator() for m in self._models}, self._lapses, self._deaths)

    def _served(self) -> bytes:
        self._on_server = self._read()
        return self._on_server

    def _swap(self, state: bytes) -> bytes:
        """Reads what the server holds, and puts `state` in its place."""
        with self._redis.pipeline(transaction=False) as pipeline:
            self._read(client=pipeline)
            self._write(args=[state], client=pipeline)
            after, _ = pipeline.execute()
        self._on_server = state
        return bytes(after)

    def _steps(self, state: State) -> Iterator[Step]:
        for name in self._calls:
            yield "admit", name
        for model, seen in state.seen.items():
            if self._forgets and seen.forgotten < len(seen.commits):
                yield "forget", model
        for worker in state.workers:
            if state.deaths:
                yield "die", worker.node
            if state.lapses and any(seen.owner == worker.name for seen in state.seen.values()):
                yield "lapse", worker.node
            for model in self._models:
                yield from ((step, worker.node, model) for step in _worker_steps(worker.memory.get(model)))

    def _after(self, state: State, step: Step, path: tuple[Step, ...]) -> State:
        if self._on_server != state.server:
            self._write(args=[state.server])
        try:
            after = self._take(state, step)
            after = replace(after, server=self._swap(state.server))
            self._check(after)
        except AssertionError as error:
            steps = "\n  ".join(" ".join(each) for each in path)
            raise Broken(f"{error}, after\n  {steps}") from None
        return after

    def _take(self, state: State, step: Step) -> State:
        what, *where = step
        if what == "admit":
            return self._admit(state, self._calls[where[0]])
        if what == "forget":
            return self._forget(state, where[0])
        index, worker = next((i, w) for i, w in enumerate(state.workers) if w.node == where[0])
        if what == "lapse":
            return self._lapse(state, worker)
        if what == "die":
            reborn = replace(worker, boot=worker.boot + 1, memory={})
            self._redis.delete(keys.lease(worker.name))
            return _with_worker(replace(state, deaths=state.deaths - 1), index, reborn)
        model = where[1]
        memory, seen = getattr(self, f"_{what}")(worker, model, state.seen[model])
        state = _with_worker(state, index, worker.with_memory(model, memory))
        return replace(state, seen={**state.seen, model: seen})

    def _admit(self, state: State, call: Call) -> State:
        """Sends a call, for the first time or again, and then another one under its seq."""
        seen = state.seen[call.model]
        first = call.seq not in seen.admitted
        if call.kind == REFUSED:
            taken = self._oplog.refuse(call.model, call.seq, call.name, REFUSED)
            assert taken == first, f"{call.name} is refused: {taken}"
            if first:
                doomed = self._doomed_behind(call.seq, call.model, call.name, seen)
                seen = replace(seen, doomed={**doomed, call.seq: call.name})
        elif call.seq < seen.forgotten:
            self._check_refused(call, call.name)
        else:
            fresh = self._oplog.admit(call.model, call.seq, call.journalled, call.name.encode(), call.name).fresh
            assert fresh == first, f"{call.name} is new: {fresh}"
        self._check_refused(call, "other content")
        assert not self._oplog.refuse(call.model, call.seq, "late"), f"{call.name} is refused after its admission"
        seen = replace(seen, admitted=seen.admitted | {call.seq})
        return replace(state, seen={**state.seen, call.model: seen})

    def _check_refused(self, call: Call, content: str) -> None:
        try:
            self._oplog.admit(call.model, call.seq, BACKWARD, content.encode(), content)
        except BadRequest:
            return
        raise AssertionError(f"{content!r} is admitted as {call.model}:{call.seq}")

    def _forget(self, state: State, model: str) -> State:
        seen = state.seen[model]
        self._redis.delete(keys.future(ids.request_id(model, seen.forgotten)))
        return replace(state, seen={**state.seen, model: replace(seen, forgotten=seen.forgotten + 1)})

    def _lapse(self, state: State, worker: Worker) -> State:
        """Time passes without a heartbeat of the worker, which goes on and does not know it."""
        held = [model for model in self._models if state.seen[model].owner == worker.name]
        self._redis.delete(keys.lease(worker.name), *(keys.lease(model) for model in held))
        free = {model: replace(state.seen[model], owner="") for model in held}
        return replace(state, seen={**state.seen, **free}, lapses=state.lapses - 1)

    def _acquire(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        lease = self._oplog.acquire(model, worker.name)
        if isinstance(lease, OwnedElsewhere):
            assert seen.owner, f"{worker.name} does not get {model}, which nobody owns"
            return None, seen
        assert seen.owner.partition("/")[0] in ("", worker.node), f"{worker.name} gets {model} of {seen.owner}"
        self._oplog.renew([model], worker.name)
        assert lease.applied == len(seen.commits) - 1, f"the lease says {lease.applied} is applied"
        granted = (worker.name, lease.epoch)
        assert granted == seen.granted or lease.epoch > seen.granted[1], f"{granted} after {seen.granted}"
        return Memory(lease, lease.applied), replace(seen, owner=worker.name, granted=granted)

    def _restore(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        memory = worker.memory[model]
        history = _history(memory.lease.snapshot)
        for seq in range(memory.lease.snapshot_seq + 1, memory.lease.applied + 1):
            entry = self._oplog.entry(model, seq)
            if entry is None:
                assert not self._is_granted(memory, seen), f"{worker.name} lacks {seq} of {model} to restore it"
                return None, seen
            history = history if entry.doomed else (*history, entry.payload.decode())
        return replace(memory, history=history), seen

    def _begin(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        memory = worker.memory[model]
        try:
            entry = self._oplog.next(memory.lease, memory.applied + 1)
        except Fenced:
            return self._fenced(memory, seen)
        assert self._is_granted(memory, seen), f"{worker.name} begins an Op of {model} under an old epoch"
        admitted = memory.applied + 1 in seen.admitted
        assert (entry is not None) == admitted, f"seq {memory.applied + 1} is there: {entry is not None}"
        return replace(memory, running=entry and replace(entry, waited_s=0.0, in_doubt=False)), seen

    def _put_off(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        memory = worker.memory[model]
        assert memory.running is not None
        self._oplog.put_off(memory.lease, memory.running.seq)
        return replace(memory, running=None), seen

    def _commit(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        memory = worker.memory[model]
        entry, history = memory.running, memory.history
        assert entry is not None and history is not None
        name = entry.payload.decode() or entry.kind
        failed = bool(entry.doomed) or name.endswith(FAILING)
        history = history if failed else (*history, name)
        body = f"{name} {'failed' if failed else 'done'} {','.join(history)}"
        try:
            self._oplog.commit(memory.lease, entry.seq, Result(body.encode(), failed=failed), why=name)
        except Fenced:
            return self._fenced(memory, seen) if entry.seq == len(seen.commits) else (None, seen)
        assert self._is_granted(memory, seen), f"{worker.name} commits to {model} under an old epoch"
        assert entry.seq == len(seen.commits), f"{entry.seq} is committed as number {len(seen.commits)}"
        reason = seen.doomed.get(entry.seq, "")
        assert entry.doomed == reason, f"{name} is doomed for {entry.doomed!r}, and should be for {reason!r}"
        lost = failed and entry.kind == BACKWARD
        seen = replace(
            seen,
            commits=(*seen.commits, body),
            history=history if not failed else seen.history,
            doomed=self._doomed_behind(entry.seq, model, name, seen) if lost else seen.doomed,
        )
        assert history == seen.history, f"{worker.name} applied {history}, and the run is {seen.history}"
        return Memory(memory.lease, entry.seq, history), seen

    def _commit_unheard(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        """The answer to a commit is lost: the worker will commit once more."""
        memory = worker.memory[model]
        return memory, self._commit(worker, model, seen)[1]

    def _snapshot(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        memory = worker.memory[model]
        assert memory.history is not None
        with suppress(Fenced):  # stale, or not newer: the worker goes on, and its next Op shows which
            self._oplog.set_snapshot(memory.lease, memory.applied, f"{memory.applied} {','.join(memory.history)}")
        return memory, seen

    def _release(self, worker: Worker, model: str, seen: Spectator) -> tuple[Memory | None, Spectator]:
        self._oplog.release(model, worker.name)
        return None, replace(seen, owner="") if seen.owner == worker.name else seen

    def _fenced(self, memory: Memory, seen: Spectator) -> tuple[None, Spectator]:
        assert not self._is_granted(memory, seen), f"{memory.lease.worker} is fenced off the model that it owns"
        return None, seen

    def _is_granted(self, memory: Memory, seen: Spectator) -> bool:
        return seen.granted == (memory.lease.worker, memory.lease.epoch)

    def _doomed_behind(self, lost: int, model: str, reason: str, seen: Spectator) -> dict[int, str]:
        """`seen.doomed` and the Ops that wait behind a lost gradient, up to and including the next optim_step."""
        kinds = {call.seq: call.kind for call in self._calls.values() if call.model == model}
        doomed = dict(seen.doomed)
        for seq in sorted(seq for seq in seen.admitted if seq > lost):
            doomed.setdefault(seq, reason)
            if kinds[seq] == STEP:
                break
        return doomed

    def _check(self, state: State) -> None:
        """The promises that hold in every state, on what the server holds."""
        held = {key: what for key, _, what in msgpack.unpackb(state.server, raw=False)}
        for model, seen in state.seen.items():
            head = pairs(held[keys.model(model)])
            assert int(head["applied"]) == len(seen.commits) - 1, f"{model} says that {head['applied']} is applied"
            for seq, body in enumerate(seen.commits[seen.forgotten :], seen.forgotten):
                future = pairs(held[keys.future(ids.request_id(model, seq))])
                assert "refused" in future or future.get("body") == body, f"{model}:{seq} was {body!r}, is {future}"
            history = _history(head["snapshot"])
            for seq in range(int(head["snapshot_seq"]) + 1, len(seen.commits)):
                request = ids.request_id(model, seq)
                op = pairs(held[keys.op(request)])
                history = history if "doomed" in op else (*history, str(held[keys.payload(request)]))
            assert history == seen.history, f"the journal of {model} holds {history}, and the run is {seen.history}"
            for seq in seen.admitted:
                op = pairs(held.get(keys.op(ids.request_id(model, seq)), []))
                missed = self._lapses + self._deaths - state.lapses - state.deaths
                assert int(op.get("attempts", 0)) <= missed, f"{model}:{seq} has {op['attempts']} attempts"

    def _check_nothing_is_lost(self, state: State, path: tuple[Step, ...]) -> None:
        for call in self._calls.values():
            if call.seq >= len(state.seen[call.model].commits):
                steps = "\n  ".join(" ".join(each) for each in path)
                raise Broken(f"{call.name} never ends, after\n  {steps}")


def _worker_steps(memory: Memory | None) -> Iterator[str]:
    if memory is None:
        yield "acquire"
    elif memory.history is None:
        yield "restore"
    elif memory.running is not None:
        yield from ("commit", "commit_unheard", "put_off")
    else:
        yield from ("begin", "release")
        if memory.applied > memory.lease.snapshot_seq:
            yield "snapshot"


def _with_worker(state: State, index: int, worker: Worker) -> State:
    return replace(state, workers=(*state.workers[:index], worker, *state.workers[index + 1 :]))


def _history(snapshot: str) -> History:
    return tuple(filter(None, snapshot.partition(" ")[2].split(",")))
