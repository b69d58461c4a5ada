"""Lifecycle on Redis: expiry of silent sessions, teardown of models and samplers, and unreferenced objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import redis

from app import ids
from app.domain import ops
from app.domain.limits import Charge
from app.domain.records import Checkpoint, Model
from app.domain.results import Result
from app.errors import NotFound, Unavailable
from app.settings import EngineSettings
from app.stores.redis import keys, limits
from app.stores.redis.client import Scripts, flat, slices, texts
from app.stores.redis.journal import ENDED, RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Holder, Record

SAMPLING_ENDED = "cancelled: its session has ended"
_SLICE = 1000
# A session takes 10 to 20 us to expire, and everybody else waits for the server meanwhile.
_EXPIRED_AT_ONCE = 500
# One script ends this many requests in 12 ms; all other clients of the server wait meanwhile.
_ABORTED_AT_ONCE = 100
_LOSSES_LEFT = 2  # the reply of the script `forget`
# Samplers that one script looks at; it looks at all of them again for each of its slices of requests.
_SAMPLERS_AT_ONCE = 200
# The SDK sends a heartbeat every 10 s. A client without heartbeats polls again after at most `api.poll_hold_s`.
PAUSE_S = 60.0
_PAUSE_MS = int(PAUSE_S * 1000)
# All other clients wait meanwhile.
_ENDED_AT_ONCE = 200
# One script pauses or resumes this many requests in 4 to 9 ms, of 20,000 that a client has waiting.
_PAUSED_AT_ONCE = 200


class RedisLifecycle:
    """The ends of sessions, models and files. All times are the state server's own.

    A heartbeat, a poll, or an Op of one of its models or samplers, is a sign of life of a session. Its sampling
    requests are paused after `PAUSE_S` seconds without one. A session ends when it is finished, or without a sign of
    life for `engine.session_s`. An Op revives it; so does a heartbeat, unless the session was finished.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)
        self._silence_ms = int(settings.session_s * 1000)
        self._retain_ms = int(settings.retain_s * 1000)
        self._orphan_ms = int(settings.orphan_s * 1000)
        self._ephemeral_ms = int(settings.ephemeral_s * 1000)
        self._unread_s = settings.result_unread_s

    def open(self, session_id: str, fields: Record, charge: Charge) -> None:
        """Opens a session; one that exists does not change and is not charged again. Raises TooManyRequests or
        LimitReached for a limit of `charge`, and Unavailable while there is no room for another record."""
        limits.check(self._run("open_session", session_id, limits.encoded(charge), *flat(fields)))

    def heartbeat(self, session_id: str) -> None:
        """Notes that the client of the session is alive."""
        self._run("heartbeat", session_id)

    def poll(self, request_id: str) -> None:
        """Notes that a client waits for the result of this request. A session that has ended stays so."""
        self._run("poll", request_id.partition(":")[0])

    def finish(self, session_id: str, reason: str, detail: str = "") -> None:
        """Ends the session because its client is done. The first reason stays as its status, with its `detail`."""
        self._run("finish", session_id, json.dumps(reason), json.dumps(detail) if detail else "")

    def move(self, session_id: str, project: str, *, begun: bool = False) -> None:
        """Moves the session, with everything in it or being saved in it, to another project: in one step, or in several
        if it has more than 200 records. If these are cut short, a repeat moves the rest; `begun` says that this is
        such a repeat, which changes nothing once the session has been moved elsewhere. A session that is gone does not
        change."""
        left: Sequence[bytes | str | int] = (1, "") if begun else ()
        while isinstance(found := self._run("move_session", session_id, json.dumps(project), *left), list):
            left = found

    def expire(self) -> list[str]:
        """Ends the sessions without a sign of life. Returns their ids."""
        return texts(self._run("expire", self._silence_ms, _EXPIRED_AT_ONCE))

    def heard(self, session_ids: Sequence[str]) -> set[str]:
        """Those of these sessions that have not ended. One that its client finished and used again keeps its status."""
        scores = self._redis.zmscore(keys.SESSIONS_HEARD, list(session_ids)) if session_ids else []
        return {id_ for id_, score in zip(session_ids, cast(list[Any], scores), strict=True) if score is not None}

    def retired(self) -> list[str]:
        """Sessions that ended `engine.retain_s` ago or earlier."""
        past = self._now_ms() - self._retain_ms
        return texts(self._redis.zrangebyscore(keys.SESSIONS_ENDED, "-inf", past, 0, _SLICE))

    def forget(self, session_id: str) -> bool | None:
        """Removes the custom losses of a retired session, some at each call, and its record with the last ones. Returns
        None while losses are left, and False, without a change, for a session that is not retired any more."""
        reply = self._run("forget", session_id, self._retain_ms, ids.loss_prefix(session_id))
        return None if reply == _LOSSES_LEFT else bool(reply)

    def end_model(self, model_id: str, *, retired: bool = False) -> Holder | None:
        """Ends a model for good, in one step; a repeat changes nothing.

        Its owner is fenced, its snapshot pointer is deleted, and later Ops and owners get Gone. Its journal is deleted,
        and its waiting Ops fail ("user"): in the same step, or by `end_calls` if the journal is long. Returns None for
        an unknown model; with `retired` also, without a change, when the model's session is not retired any more.
        """
        failed = Result.failure(ENDED)
        ended = self._retain_ms if retired else ""
        found = self._run("end_model", model_id, self._unread_s, failed.content_type, failed.body, ended)
        if not found:
            return None
        base_model, worker, full = texts(found)
        return Holder(base_model, ids.node_of(worker), json.loads(full))

    def end_calls(self) -> None:
        """Deletes the journals that are left of ended models. Their waiting Ops fail ("user")."""
        failed = Result.failure(ENDED)
        while self._run("end_calls", self._unread_s, failed.content_type, failed.body):
            pass

    def unload(self, model_id: str) -> None:
        """Notes that the client does not need the model in memory until its next Op. Does nothing for an unknown
        model."""
        self._run("unload", model_id)

    def end_sampler(self, sampler_id: str, *, retired: bool = True) -> bool:
        """Removes a sampler's record. Returns False, without a change, when there is none; with `retired` also when its
        session is not retired any more."""
        return bool(self._run("end_sampler", sampler_id, self._retain_ms if retired else "", self._unread_s))

    def end_samplers(self, sampler_ids: Sequence[str], *, retired: bool) -> None:
        """Removes the records of many samplers, as `end_sampler` does."""
        for slice_ in slices(sampler_ids, _ENDED_AT_ONCE):
            self._run("end_samplers", self._retain_ms if retired else "", self._unread_s, *slice_)

    def use_sampler(self, sampler_id: str) -> bool:
        """Notes that a sampler is about to be used, so that `end_unused_samplers` leaves it for at least half of
        `engine.ephemeral_s`. Returns False when there is none yet."""
        return bool(self._run("use_sampler", sampler_id, self._ephemeral_ms))

    def end_unused_samplers(self, sampler_ids: Sequence[str], *, copies: bool = True) -> int:
        """Ends those of these samplers that have no unfinished request, and were made and last used
        `engine.ephemeral_s` ago or earlier. Returns their number. Without `copies`, nothing may still run on them."""
        keep_s = self._unread_s if copies else 0
        return sum(
            self._run("end_unused_samplers", self._ephemeral_ms, keep_s, *slice_)
            for slice_ in slices(sampler_ids, _ENDED_AT_ONCE)
        )

    def adapters(self, model_id: str) -> dict[str, str]:
        """The adapters of the run's saves without a path: their prefixes by sampling session; empty for one that was
        given up, whose files are deleted already, or by the orphans maintenance task."""
        prefix, found = ids.sampler_prefix(ids.session_of(model_id)), list[str]()
        first, last = f"[{prefix}", b"(" + prefix.encode() + b"\xff"
        while first:
            rows = texts(self._run("adapters", model_id, first, last, _SLICE))
            first = f"({rows.pop()}" if len(rows) % 2 else ""
            found += rows
        return dict(zip(found[::2], found[1::2], strict=True))

    def give_up_adapters(self, sampler_ids: Sequence[str]) -> list[str]:
        """Gives up the adapters of those of these sampling sessions that are not in use, and returns their ids. Their
        requests are refused from then on, and nothing needs the files any more."""
        return texts(self._run("give_up_adapters", self._ephemeral_ms, *sampler_ids)) if sampler_ids else []

    def count_adapters(self, sizes: Mapping[str, int]) -> None:
        """Sets the bytes of adapters of saves without a path, by the names of all payers that have some."""
        self._run("set_ephemeral", *flat(sizes))

    def adapters_in_use(self, session_id: str) -> set[str]:
        """The adapters, by prefix, that unfinished requests of the session's samplers run on."""
        in_use: set[str] = set()
        for sampler_id in self._asked(session_id):
            for slice_ in slices(texts(self._redis.smembers(keys.sampled(sampler_id))), _SLICE):
                with self._redis.pipeline(transaction=False) as pipe:
                    for request_id in slice_:
                        pipe.hget(keys.op(request_id), "adapter")
                    in_use.update(texts(filter(None, pipe.execute())))
        return in_use

    def abort_samples(self, session_id: str | None = None) -> int:
        """Fails ("user") the unfinished requests of samplers that are gone or whose session has ended; with
        `session_id` only those of this session's samplers. Returns their number."""
        return sum(map(self._abort_samples, slices(self._asked(session_id), _SAMPLERS_AT_ONCE)))

    def _abort_samples(self, sampler_ids: Sequence[str]) -> int:
        failed = Result.failure(SAMPLING_ENDED)
        args = (self._unread_s, failed.content_type, failed.body)
        return _sum(lambda: self._run("abort_samples", _ABORTED_AT_ONCE, *args, *sampler_ids))

    def _asked(self, session_id: str | None) -> list[str]:
        """The samplers with unfinished requests, of one session or of all."""
        asked = texts(self._redis.smembers(keys.SAMPLERS_ASKED))
        return asked if session_id is None else [id_ for id_ in asked if id_.startswith(ids.sampler_prefix(session_id))]

    def take_revoked(self) -> list[str]:
        """The oldest futures that ended without a result of a run: cancelled ones, and those of ended models. Each is
        returned once."""
        return texts(self._redis.lpop(keys.REVOKED, _SLICE) or ())

    def pause_samples(self) -> int:
        """Pauses the unfinished requests of silent sessions, at no attempt: they run when the session is heard again,
        and end with it. Returns their number."""
        return _sum(lambda: self._run("pause_samples", _PAUSE_MS, _PAUSED_AT_ONCE))

    def resume_samples(self) -> int:
        """Puts the paused requests of sessions that are heard again back into their queues. Returns their number."""
        return _sum(lambda: self._run("resume_samples", _PAUSE_MS, _PAUSED_AT_ONCE))

    def holders(self, model_ids: Iterable[str]) -> list[Holder]:
        """The places of these models in memory; models that no worker holds are left out."""
        found: list[Any] = []
        for slice_ in slices(list(model_ids), _SLICE):
            with self._redis.pipeline(transaction=False) as pipe:
                for model_id in slice_:
                    pipe.get(keys.lease(model_id))
                    pipe.hmget(keys.model(model_id), "base_model", "full")
                found += pipe.execute()
        return [
            Holder(json.loads(base), ids.node_of(held.decode()), json.loads(full or "false"))
            for held, (base, full) in zip(found[::2], found[1::2], strict=True)
            if held and base
        ]

    def unwanted(self, model_ids: Iterable[str]) -> set[str]:
        """The models of these that a worker should unload: ended and unknown ones; of those without waiting Ops, the
        unloaded ones and those whose session has ended."""
        return set(texts(self._run("unwanted", *model_ids)))

    def loads(self, model_ids: Sequence[str]) -> Iterator[tuple[str, int]]:
        """The Ops in these models' journals, as model id and seq, that read a checkpoint when they run or are
        replayed. It is one round trip, unless a journal is long."""
        calls = [(model_id, "-inf", str(_SLICE)) for model_id in model_ids]
        while calls:
            rest = []
            for (model_id, *_), rows in zip(calls, self._run.each("loads", calls), strict=True):
                yield from ((model_id, int(row)) for row in rows if not row.startswith(b">"))
                rest += [(model_id, row[1:].decode(), str(_SLICE)) for row in rows if row.startswith(b">")]
            calls = rest

    def overdue(self, unreferenced: Iterable[str]) -> list[str]:
        """Notes everything that is unreferenced now. Returns what was in every such note for `engine.orphan_s`."""
        now, current = self._now_ms(), set(unreferenced)
        marked = {mark.decode() for mark, _ in self._redis.zscan_iter(keys.ORPHANS, count=_SLICE)}
        for gone in slices(sorted(marked - current), _SLICE):
            self._redis.zrem(keys.ORPHANS, *gone)
        for new in slices(sorted(current - marked), _SLICE):
            self._run("mark_orphans", now, *new)
        return texts(self._redis.zrangebyscore(keys.ORPHANS, "-inf", now - self._orphan_ms))

    @contextlib.contextmanager
    def removing(self, prefix: str) -> Iterator[bool]:
        """The removal of an orphan that `overdue` returned: nobody uses its files meanwhile. Yields False if a call has
        begun to use them since, and then they stay."""
        claimed = bool(self._run("claim_orphan", prefix))
        try:
            yield claimed
        except Exception:
            self._redis.zadd(keys.ORPHANS, {prefix: 1}, xx=True)  # overdue
            raise
        if claimed:
            self._redis.zrem(keys.ORPHANS, prefix)

    def use_files(self, prefix: str) -> None:
        """Notes that a call is about to complete files that lie at the prefix, and to refer to them. They are no orphan
        for the next `engine.orphan_s`. Raises Unavailable while they are being removed."""
        if not self._run("use_files", prefix):
            raise Unavailable("the files of an earlier attempt are being removed; try again soon")

    def _now_ms(self) -> int:
        seconds, micros = self._redis.time()
        return seconds * 1000 + micros // 1000


class Pins:
    """The files in the object store that journals load: their Ops still run, or may be replayed."""

    def __init__(self, oplog: RedisOpLog, lifecycle: RedisLifecycle, records: RedisRecords) -> None:
        self._oplog, self._lifecycle, self._records = oplog, lifecycle, records

    def __iter__(self) -> Iterator[str]:
        """The prefixes. Raises NewerContent, and NotFound for a call whose content is lost."""
        return self._loaded(lambda _: True)

    def may_have(self, checkpoint: Checkpoint) -> bool:
        """False if no journal loads the checkpoint's files. True also if a call cannot be read."""
        base_model = json.dumps(checkpoint.base_model)
        try:
            return checkpoint.prefix in self._loaded(lambda run: run.get("base_model") == base_model)
        except (Unavailable, NotFound):
            return True

    def _loaded(self, may_load: Callable[[Mapping[str, str]], bool]) -> Iterator[str]:
        """The prefixes that those runs load which `may_load` is true for."""
        runs = self._records.list(Model.namespace)
        live = [model_id for model_id, fields in runs if "ended" not in fields and may_load(fields)]
        for slice_ in slices(live, _SLICE):
            for model_id, seq in self._lifecycle.loads(slice_):
                entry = self._oplog.entry(model_id, seq)
                if entry is not None and entry.payload:
                    yield ops.decode(entry.payload).prefix


def _sum(run: Callable[[], int]) -> int:
    """Runs a script that works in slices until nothing is left. Returns the sum of its replies."""
    total = 0
    while count := int(run()):
        total += count
    return total
