"""Sampling requests on a real server: each ends exactly once, for any calls in any order.

Each request counts at its assigned sampler exactly until it ends, and its client receives its completion.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app import ids
from app.domain.records import Sampler, Session, Worker
from app.domain.results import SAMPLED, Result
from app.errors import BadRequest, Fenced, TooManyRequests
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.completions import RedisCompletions
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import QueueBounds
from tests.pages import used
from tests.property.runs import run_machine

SESSIONS = ("one", "two")
QUEUE = "sample.base"
BOUNDS = QueueBounds(requests=5, tokens=30)
CLONES = (0, 7)
BATCHES = {"a": 2, "b": 3}
HOLDS = 5
SETTINGS = EngineSettings(lease_s=600)


@dataclass
class Request:
    session: str
    tokens: int
    digest: str
    sequences: int
    node: str
    throttled: bool
    off: bool = False
    runner: str = ""
    result: Result | None = None
    aborted: bool = False
    drawn_until_stopped: int = 0

    @property
    def over(self) -> bool:
        return self.aborted or self.result is not None


class SamplingMachine(RuleBasedStateMachine):
    client: redis.Redis

    @initialize()
    def start(self) -> None:
        self.client.flushall()
        self.oplog, self.records = RedisOpLog(self.client, SETTINGS), RedisRecords(self.client)
        self.lifecycle = RedisLifecycle(self.client, SETTINGS)
        self.completions = RedisCompletions(self.client, SETTINGS)
        for session in SESSIONS:
            self.records.put_new(Session.namespace, session, dump(Session("me", 0.0)))
            self.records.put_new(Sampler.namespace, _sampler(session), dump(Sampler("me", session, "base", 0.0)))
        self.up: set[str] = set()
        self.affinity: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.unreported: dict[str, list[str]] = {_target(s, c): [] for s in SESSIONS for c in CLONES}
        self.cursors = dict.fromkeys(self.unreported, 0)

    @rule(
        session=st.sampled_from(SESSIONS),
        clone=st.sampled_from(CLONES),
        number=st.integers(0, 9),
        tokens=st.integers(1, 32),
        sequences=st.sampled_from([1, 2, 3, 40]),
    )
    def admit(self, session: str, clone: int, number: int, tokens: int, sequences: int) -> None:
        request_id = ids.request_id(_sampler(session), clone * 10**9 + number)
        digest = f"digest {tokens % 2}"
        waiting = [r for r in self.requests.values() if not r.over]
        known = self.requests.get(request_id)
        if known:
            outcome = "repeat" if known.digest == digest else BadRequest
        elif tokens > BOUNDS.tokens:
            outcome = BadRequest
        elif len(waiting) >= BOUNDS.requests or sum(r.tokens for r in waiting) + tokens > BOUNDS.tokens:
            outcome = TooManyRequests
        else:
            outcome = "fresh"
        try:
            args = (request_id, _sampler(session), "me", QUEUE, b"ask", digest, tokens, BOUNDS, sequences)
            admission = self.oplog.admit_sample(*args)
            found: object = "fresh" if admission.fresh else "repeat"
        except (BadRequest, TooManyRequests) as error:
            found = type(error)
        assert found == outcome
        if found == "fresh":
            held = self._any_throttled() or not self._may_dispatch(sequences)
            node = "" if held else self._pick_node(session)
            assert (admission.throttled, admission.node or "") == (held, node)
            self.requests[request_id] = Request(session, tokens, digest, sequences, node, held)
            self.ended.discard(session)

    @rule()
    def release(self) -> None:
        found = dict(self.oplog.release_samples(QUEUE))
        for request_id, node in found.items():
            request = self.requests[request_id]
            assert request.throttled
            assert not request.over
            assert self._may_dispatch(request.sequences)
            request.node, request.throttled = self._pick_node(request.session), False
            assert (node or "") == request.node
        held = [r for r in self.requests.values() if r.throttled and not r.over]
        assert not held or not all(self._may_dispatch(request.sequences) for request in held)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99), worker=st.sampled_from(["a/1", "b/1"]))
    def claim(self, pick: int, worker: str) -> None:
        request_id, request = self._pick(pick)
        if request.throttled and not request.over:
            return  # it was not dispatched
        try:
            entry = self.oplog.claim_sample(request_id, worker)
        except Fenced:
            assert request.runner
            assert not request.over
            return
        assert (entry is None) == request.over
        if entry:
            assert not request.runner
            request.runner, request.off = worker, False
            node = worker.partition("/")[0]
            if self.affinity.get(request.session, request.node) == request.node:
                self.affinity[request.session] = node
            request.node = node

    @rule(node=st.sampled_from(sorted(BATCHES)))
    def start_or_stop(self, node: str) -> None:
        self.up ^= {node}
        if node in self.up:
            worker = Worker("sampler", "base", {}, {}, "", 0.0, queue=QUEUE, batch=BATCHES[node], holds=HOLDS)
            self.records.put(Worker.namespace, node, dump(worker))
        else:
            self.records.delete(Worker.namespace, node)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99), crash=st.booleans())
    def requeue(self, pick: int, crash: bool) -> None:
        """Its worker requeues it, or dies and its lease expires."""
        request_id, request = self._pick(pick)
        if crash:
            self.client.delete(keys.lease(request_id))
        else:
            self.oplog.put_off_sample(request_id, request.runner, {SAMPLED: 1})
            if request.runner and request.aborted:
                request.drawn_until_stopped = 1
            if request.runner and not request.over:
                request.node, request.off = "", True
        request.runner = ""

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99), failed=st.booleans())
    def finish(self, pick: int, failed: bool) -> None:
        request_id, request = self._pick(pick)
        result = Result(f"result of {len(self.requests)}".encode(), failed=failed)
        assert self.oplog.finish_sample(request_id, result, {SAMPLED: request.tokens}) == (not request.over)
        if not request.over:
            request.result = result
            self._reported_later(request_id)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        request_id, request = self._pick(pick)
        assert self.oplog.cancel_sample(request_id) == (not request.over)
        if not request.over:
            request.aborted = True
            self._reported_later(request_id)

    @rule(session=st.sampled_from(SESSIONS))
    def end(self, session: str) -> None:
        self.lifecycle.finish(session, "success")
        self.ended.add(session)

    @rule()
    def sweep(self) -> None:
        over = {id_: r for id_, r in self.requests.items() if r.session in self.ended and not r.over}
        assert self.lifecycle.abort_samples() == len(over)
        for request in over.values():
            request.aborted = True
        self._reported_later(*over)

    @rule(session=st.sampled_from(SESSIONS), clone=st.sampled_from(CLONES), lost=st.booleans())
    def poll(self, session: str, clone: int, lost: bool) -> None:
        target = _target(session, clone)
        found, cursor = self.completions.since(target, self.cursors[target])
        assert sorted(c.request_id for c in found) == sorted(self.unreported[target])
        assert {c.request_id: c.failed for c in found} == {
            id_: self._has_failed(id_) for id_ in self.unreported[target]
        }, "and how it ended"
        assert cursor >= self.cursors[target]
        if not lost:
            self.cursors[target], self.unreported[target] = cursor, []

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99))
    def read(self, pick: int) -> None:
        request_id, request = self._pick(pick)
        future = self.oplog.future(request_id, {"me"})
        assert (future.result is not None) == request.over
        if request.result is not None:
            assert future.result == request.result, "a result changed"
        if request.over:
            with contextlib.suppress(ValueError):
                self.unreported[ids.target_of(request_id)].remove(request_id)

    @invariant()
    def the_queue_counts_exactly_what_is_not_over(self) -> None:
        held = self.client.hgetall(f"{keys.PREFIX}sampling:{QUEUE}")
        waiting = {id_: r.tokens for id_, r in self.requests.items() if not r.over}
        assert {id_.decode(): int(tokens) for id_, tokens in held.items()} == waiting
        total = self.client.hget(keys.PREFIX + "sampling_tokens", QUEUE)
        assert int(total or 0) == sum(waiting.values())
        assert sorted(row.id for row in self.oplog.pending()) == sorted(waiting)

    @invariant()
    def what_was_drawn_is_counted_once_and_only_for_a_result_or_until_a_cancellation(self) -> None:
        drawn = [r.tokens for r in self.requests.values() if r.result is not None and not r.result.failed]
        drawn += [r.drawn_until_stopped for r in self.requests.values()]
        assert sum(used(self.client).values()) == sum(drawn)

    @invariant()
    def each_sampler_counts_exactly_what_went_there_and_is_not_over(self) -> None:
        held = self.client.hgetall(f"{keys.PREFIX}placed:{QUEUE}")
        placed = {node: self._placed(node) for node in BATCHES if self._placed(node)}
        assert {node.decode(): int(rows) for node, rows in held.items()} == placed

    @invariant()
    def a_project_counts_exactly_what_was_dispatched_and_is_not_over(self) -> None:
        assert int(self.client.hget(f"{keys.PREFIX}rung:{QUEUE}", "me") or 0) == self._dispatched()
        assert int(self.client.hget(f"{keys.PREFIX}rung_rows", QUEUE) or 0) == self._dispatched()
        held = {id_ for id_, r in self.requests.items() if r.throttled and not r.over}
        assert {row.id for row in self.oplog.pending() if row.throttled} == held
        assert self.client.sismember(f"{keys.PREFIX}holding:{QUEUE}", "me") == bool(held)

    @invariant()
    def nothing_is_kept_of_what_is_over_but_its_result(self) -> None:
        waiting = [id_ for id_, r in self.requests.items() if not r.over]
        kept = {key.decode() for key in self.client.keys(keys.PREFIX + "payload:*")}
        assert kept == {keys.payload(id_) for id_ in waiting}
        asked = {key.decode() for key in self.client.smembers(keys.PREFIX + "samplers_asked")}
        assert asked == {_sampler(self.requests[id_].session) for id_ in waiting}

    def _placed(self, node: str) -> int:
        return sum(request.sequences for request in self.requests.values() if request.node == node and not request.over)

    def _dispatched(self) -> int:
        counted = (r for r in self.requests.values() if not (r.throttled or r.off or r.over))
        return sum(request.sequences for request in counted)

    def _any_throttled(self) -> bool:
        return any(request.throttled and not request.over for request in self.requests.values())

    def _may_dispatch(self, sequences: int) -> bool:
        """Limit of one project's dispatches: one request in any case, 64 sequences, or three batches."""
        dispatched, batch = self._dispatched(), sum(BATCHES[node] for node in self.up)
        return dispatched == 0 or dispatched + sequences <= 64 or dispatched < 3 * batch

    def _pick_node(self, session: str) -> str:
        """Picks the sampler for an adapter.

        The affine sampler is taken while it is up and has room, or while no sampler has room and the other one is no
        batch ahead. Else the emptier one is taken, which becomes the affinity of an adapter without one.
        """
        room = {node: BATCHES[node] - self._placed(node) for node in self.up}
        taking = [node for node in room if self._placed(node) < HOLDS]
        best = min(taking, key=lambda node: (-room[node], _tie_break(session, node)), default="")
        affine = self.affinity.get(session, "")
        if affine not in room:
            self.affinity.pop(session, None)
            if best:
                self.affinity[session] = best
            return best
        if room[affine] > 0:
            return affine
        stays = affine in taking and room[best] <= 0 and room[best] - room[affine] < BATCHES[affine]
        return affine if stays else best

    def _pick(self, pick: int) -> tuple[str, Request]:
        return list(self.requests.items())[pick % len(self.requests)]

    def _has_failed(self, request_id: str) -> bool:
        request = self.requests[request_id]
        return request.aborted or bool(request.result and request.result.failed)

    def _reported_later(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.unreported[ids.target_of(request_id)].append(request_id)


def _sampler(session: str) -> str:
    return ids.sampling_session_id(session, 0)


def _tie_break(session: str, node: str) -> str:
    """Tie-break: of two equally empty samplers, the one with the smaller value."""
    return hashlib.sha1(f"{keys.PREFIX}home:{_sampler(session)}{node}".encode()).hexdigest()


def _target(session: str, clone: int) -> str:
    return ids.poll_target(_sampler(session), clone)


def test_sampling_requests_do_what_their_model_says(client: redis.Redis) -> None:
    run_machine(type("Sampling", (SamplingMachine,), {"client": client}), short=40)
