"""Records on Redis, each a hash that a sorted set lists. `dump` and `load` convert records to and from flat fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Literal, TypeVar, cast

import redis

from app.domain.accounts import Account, Key, User
from app.domain.progress import Point, Progress, Recorded
from app.domain.records import Checkpoint, Demand, Loss, Model, Refusal, Sampler, Session, ShmTransfer, Upload, Worker
from app.errors import NotFound, TooLarge, Unavailable
from app.settings import EngineSettings
from app.stores.pages import Ledger
from app.stores.redis import keys
from app.stores.redis.client import Scripts, flat, found_fields, is_outage, read_hash, slices, text_fields, texts
from app.stores.redis.types import Record

_POINT_FIELDS = {each.name for each in dataclasses.fields(Point)} - {"kind", "seq", "at"}
# Records per round trip: the server answers other clients in between, and 10,000 records are never in memory at once.
_SLICE = 500
_CHECKPOINTS, _SESSIONS, _MODELS = "checkpoints", "sessions", "models"
# A deletion between two reads makes a right list look wrong; it hardly ever comes this often in a row.
_TRIES = 3
# A client repeats a refused call every 30 s at most, and a sampler its request every minute.
_DEMAND_S = 120.0
_DEFAULTS = EngineSettings()
RETAINED = ("owner", "prefix", "public", "expires_at", "expiry_by")
"""A checkpoint that is overwritten, moved, published or given a TTL differs in one of these fields."""
Stored = tuple[str, Record]
"""A record's id and its fields."""
AnyRecord = Session | Model | Sampler | ShmTransfer | Checkpoint | Upload | Loss | Worker | Refusal | Demand | Account
R = TypeVar("R", bound=AnyRecord)


def dump(record: AnyRecord) -> dict[str, str]:
    """Converts a record to its fields, each as JSON text."""
    return {f.name: json.dumps(getattr(record, f.name)) for f in dataclasses.fields(record)}


def load(cls: type[R], stored: Mapping[str, str]) -> R:
    """The inverse of `dump`; it ignores unknown fields (a model's journal state)."""
    names = [name for name in cls.__match_args__ if name in stored]
    # One list is parsed in a third of the time of its parts.
    values = json.loads(f"[{','.join(stored[name] for name in names)}]")
    return cls(**dict(zip(names, values, strict=True)))


class RedisRecords:
    """Small flat records by namespace and id: sessions, models, checkpoints, workers (all in app/domain/records.py)."""

    def __init__(self, client: redis.Redis, settings: EngineSettings = _DEFAULTS) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None:
        """Sets fields of a record, which is made if there is none; its other fields stay. With `ttl_s` it expires after
        that time."""
        self._run("put", namespace, key, 0 if ttl_s is None else int(ttl_s * 1000), *flat(fields))

    def put_demand(self, role: str, base_model: str) -> None:
        """Records that a worker is needed for which no call waits yet."""
        fields = dump(Demand(role, base_model))
        self.put(Demand.namespace, Refusal.id(role, base_model), fields, ttl_s=_DEMAND_S)

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        """Creates a record. Returns False when it exists already; that one stays. Raises Unavailable while there is no
        room for another."""
        return bool(self._run("put_new", namespace, key, *flat(fields)))

    def put_reserved(self, path: str, checkpoint: Checkpoint) -> bool:
        """Records a checkpoint that RedisQuotas reserved room for, and ends the reservation in the same step. Returns
        False when the path has a checkpoint already; that one stays. Raises Unavailable when the reservation has
        lapsed, and while there is no room for another record."""
        outcome = self._run("put_reserved", path, checkpoint.size_bytes, *flat(dump(checkpoint)))
        if outcome < 0:
            raise Unavailable(f"saving {path} took so long that its storage reservation has expired; try again")
        return bool(outcome)

    def note_weights(self, base_model: str, weights_id: str, *, replace: bool = False) -> str:
        """Notes the id of a base model's weights if it has none yet, or with `replace` in any case; an empty id is not
        noted. Returns the id that it had before, or ""."""
        noted: bytes = self._run("note_weights", base_model, weights_id, int(replace))
        return noted.decode()

    def put_loss(self, loss_id: str, loss: Loss, most_bytes: int) -> bool:
        """Records a custom loss. Returns False when the id has one already; that one stays. Raises TooLarge when the
        losses of its session would take more than `most_bytes`, NotFound when the session is gone, and Unavailable
        while there is no room for another record."""
        outcome = self._run("put_loss", loss.session_id, loss_id, len(loss.content), most_bytes, *flat(dump(loss)))
        if outcome == -1:
            raise TooLarge(f"the custom losses of session {loss.session_id} take over {most_bytes} bytes")
        if outcome == -2:
            raise NotFound(f"session {loss.session_id!r} does not exist")
        return bool(outcome)

    def put_newer(self, namespace: str, key: str, version: int, fields: Record) -> bool:
        """Sets a record with a field `version`. Returns False, without a change, when that version or a later one
        exists."""
        return bool(self._run("put_newer", namespace, key, version, *flat(fields)))

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        """Sets fields of a record. Returns False when there is no such record; none is created."""
        return bool(self._run("update", namespace, key, *flat(fields)))

    def update_same(self, namespace: str, key: str, same: tuple[str, str], fields: Record) -> bool:
        """Sets fields of a record in which the field `same` still has the value that was read. Returns False, without a
        change, when it is gone or has changed since."""
        return bool(self._run("update_same", namespace, key, *same, *flat(fields)))

    def find(self, cls: type[R], key: str) -> R | None:
        """The record, of which only the fields of `cls` are read; None if there is none."""
        names = cls.__match_args__
        stored = found_fields(names, self._redis.hmget(keys.record(cls.namespace, key), names))
        return load(cls, stored) if stored else None

    def find_key(self, id_: str) -> tuple[Key, User | None] | None:
        """An API key and its user, if that is there, in one round trip; None if there is no such key."""
        key, user = (text_fields(_paired(parts)) for parts in self._run("key_and_user", id_))
        return (load(Key, key), load(User, user) if user else None) if key else None

    def get(self, namespace: str, key: str) -> dict[str, str] | None:
        """All fields of a record, with those that are no field of its class; None if there is none."""
        return text_fields(read_hash(self._redis, keys.record(namespace, key))) or None

    def delete(self, namespace: str, key: str) -> None:
        self._run("delete", namespace, key)

    def delete_same(self, namespace: str, key: str, fields: Record) -> bool:
        """Deletes a record that still has the `fields` that were read. Returns False when it has changed since."""
        return bool(self._run("delete_same", namespace, key, *flat(fields)))

    def delete_older(
        self, project: str, newer: Iterable[Stored], older: Iterable[Stored], entries: Mapping[str, str]
    ) -> bool:
        """Deletes the `older` checkpoints, in one step with their `entries` of the project's audit log, by path.
        Returns False, without a change, when one of all these checkpoints is gone, was overwritten, moved or published,
        or was given a TTL since it was read. Of the fields only RETAINED are used."""
        kept = [[path, _retained(fields)] for path, fields in newer]
        gone = [[path, _retained(fields), fields["prefix"], entries[path]] for path, fields in older]
        return bool(self._run("delete_older", project, json.dumps(kept), json.dumps(gone)))

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Lists the records whose id starts with `prefix`, by id, a slice at a time. Removes the ids of expired records
        from the index on the way."""
        for slice_ in self._id_slices(namespace, prefix):
            for key, fields in self.read(namespace, slice_):
                if fields:
                    yield key, fields
                else:
                    self._run("unlist", namespace, key)

    def readable_checkpoints(
        self, prefixes: Sequence[str], projects: Collection[str], *, newest: bool = False
    ) -> Iterator[dict[str, dict[str, str]]]:
        """For each prefix the checkpoints whose path starts with it and that are public or owned by one of the
        projects. With `newest` they are few: among them is the newest of each kind, and none that has expired."""
        asked = prefixes, _SLICE, _as_owners(projects)
        if newest:
            replies = self._run.by_prefix("newest_checkpoints", *asked)
        else:
            replies = self._run.by_prefix("readable_checkpoints", *asked)
        for found in replies:
            records = zip(found[::2], found[1::2], strict=True)
            yield {path.decode(): text_fields(_paired(parts)) for path, parts in records}

    def size_of_checkpoints(self, prefixes: Sequence[str], projects: Collection[str]) -> Iterator[tuple[int, int]]:
        """For each prefix the number of its `readable_checkpoints`, and their bytes."""
        for found in self._run.by_prefix("size_of_checkpoints", prefixes, _SLICE, _as_owners(projects)):
            yield sum(found[::2]), sum(map(int, found[1::2]))

    def list_checkpoints(self, projects: Collection[str], names: Sequence[str] = ()) -> dict[str, dict[str, str]]:
        """The checkpoints of these projects, by path; with `names` some fields of each, among them at least these. The
        owner in a record is its owner when it was read.

        Reads no other checkpoint, except after a process of an earlier version changed one of these: such a process
        leaves the projects' lists as they are. All checkpoints are read then, and the lists are corrected.
        """
        for _ in range(_TRIES):
            listed = self._listed(projects, names)
            if listed is not None:
                return listed
        found = {path: fields for path, fields in self.list(_CHECKPOINTS) if json.loads(fields["owner"]) in projects}
        for project in projects:
            self._relist(project, {path for path, fields in found.items() if json.loads(fields["owner"]) == project})
        return found

    def _listed(self, projects: Collection[str], names: Sequence[str]) -> dict[str, dict[str, str]] | None:
        """The checkpoints on the projects' lists; None if a list may be wrong.

        A list is right if each of its checkpoints is the project's, and their bytes are the sum that every version
        keeps: each checkpoint has bytes, so none is missing. A list also looks wrong when one of its checkpoints is
        deleted or moved before it is read.
        """
        with self._redis.pipeline() as pipe:
            pipe.hmget(keys.STORED, "since", *(f"project:{project}" for project in projects))
            for project in projects:
                pipe.smembers(keys.checkpoints_of(project))
            (since, *sums), *lists = pipe.execute()
        found: dict[str, dict[str, str]] = {}
        for project, held, listed in zip(projects, sums, lists, strict=True):
            paths, few = texts(listed), ("owner", "size_bytes", *names)
            its = dict(self.read_fields(_CHECKPOINTS, paths, few) if names else self.read(_CHECKPOINTS, paths))
            if any(json.loads(fields.get("owner", "null")) != project for fields in its.values()):
                return None
            if sum(int(fields["size_bytes"]) for fields in its.values()) != int(held or 0):
                return None
            found.update(its)
        return found if since is not None else None

    def _relist(self, project: str, owned: Set[str]) -> None:
        listed = texts(self._redis.smembers(keys.checkpoints_of(project)))
        with _outage_tolerated():
            for slice_ in slices(sorted({*owned, *listed}), _SLICE):
                self._run("relist", project, *slice_)

    def list_sessions(self, projects: Collection[str]) -> Sequence[tuple[float, str]]:
        """The sessions of these projects: (creation in unix seconds, id), in no order.

        Reads no record, except after a process of an earlier version made or removed a session: such a process leaves
        the lists as they are. All sessions are read then, and the lists are corrected. `correct_some` corrects what the
        number of sessions does not show.
        """
        return self._list_owned(_SESSIONS, projects)

    def list_runs(self, projects: Collection[str]) -> Sequence[tuple[float, str]]:
        """The runs of these projects, as `list_sessions` lists sessions."""
        return self._list_owned(_MODELS, projects)

    def _list_owned(self, namespace: str, projects: Collection[str]) -> Sequence[tuple[float, str]]:
        with self._redis.pipeline() as pipe:
            pipe.zcard(keys.index(namespace))
            pipe.hlen(keys.owners(namespace))
            for project in projects:
                pipe.zrange(keys.owned(namespace, project), 0, -1, withscores=True)
            total, listed, *lists = pipe.execute()
        if total == listed:
            return [(created, id_.decode()) for rows in lists for id_, created in rows]
        found = dict(self.list(namespace))
        self._correct(namespace, found)
        its = [(id_, fields) for id_, fields in found.items() if json.loads(fields["owner"]) in projects]
        return [(json.loads(fields["created"]), id_) for id_, fields in its]

    def _correct(self, namespace: str, ids: Iterable[str]) -> None:
        """Corrects the lists of these sessions or runs, and of all that are gone."""
        listed = texts(self._redis.hkeys(keys.owners(namespace)))
        with _outage_tolerated():
            for slice_ in slices(sorted({*ids, *listed}), _SLICE):
                self._relist_owned(namespace, slice_)

    def correct_some(self, namespace: Literal["sessions", "models"], after: str, limit: int) -> str:
        """Corrects the lists of the next `limit` sessions or runs behind the id `after`: processes of earlier versions
        leave them wrong, and ended sessions stay on those of live ones. Returns the last id; "" where the next round
        begins anew."""
        first = f"({after}" if after else "-"
        found = texts(self._redis.zrangebylex(keys.index(namespace), first, "+", 0, limit))
        if found:
            self._relist_owned(namespace, found)
        return found[-1] if len(found) == limit else ""

    def _relist_owned(self, namespace: str, ids: Sequence[str]) -> None:
        if namespace == _SESSIONS:
            self._run("relist_sessions", *ids)
        else:
            self._run("relist_runs", *ids)

    def ids(self, namespace: str, prefix: str) -> Iterator[str]:
        """The ids in a namespace that start with `prefix`, in order, a slice at a time. Reads no record."""
        for slice_ in self._id_slices(namespace, prefix):
            yield from slice_

    def _id_slices(self, namespace: str, prefix: str) -> Iterator[Sequence[str]]:
        first, last = f"[{prefix}", cast(str, b"[" + prefix.encode() + b"\xff")
        while True:
            slice_ = texts(self._redis.zrangebylex(keys.index(namespace), first, last, 0, _SLICE))
            yield slice_
            if len(slice_) < _SLICE:
                return
            first = f"({slice_[-1]}"

    def read(self, namespace: str, ids: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Reads records by their ids, a slice at a time; a missing one has no fields."""
        for slice_ in slices(ids, _SLICE):
            with self._redis.pipeline(transaction=False) as pipe:
                for id_ in slice_:
                    pipe.hgetall(keys.record(namespace, id_))
                found = pipe.execute()
            yield from zip(slice_, map(text_fields, found), strict=True)

    def read_fields(
        self, namespace: str, ids: Sequence[str], names: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """Reads some fields of records by their ids, as `read` does. One reply of plain values is parsed in a tenth of
        the time of many replies."""
        for slice_ in slices(ids, _SLICE):
            found = self._run("read_fields", namespace, len(names), *names, *slice_)
            values = (found[start : start + len(names)] for start in range(0, len(found), len(names)))
            for id_, its in zip(slice_, values, strict=True):
                yield id_, found_fields(names, its)

    def progress(self, model_ids: Sequence[str], most_points: int) -> Sequence[Progress]:
        """The progress of each model, with at most `most_points` points; an empty one for an unknown or ended model."""
        with self._redis.pipeline(transaction=False) as pipe:
            for model_id in model_ids:
                pipe.hmget(keys.model(model_id), "steps", "trained_tokens")
                pipe.xrevrange(keys.progress(model_id), count=most_points)
            found = pipe.execute()
        return [
            Progress(int(steps or 0), int(tokens or 0), [_load_point(*row) for row in reversed(rows)])
            for (steps, tokens), rows in zip(found[::2], found[1::2], strict=True)
        ]

    def record(self, model_id: str, found: Iterable[Recorded]) -> None:
        """Keeps metrics that a client recorded for a run, those of a repeated event once; nothing happens once the run
        has ended. Raises Unavailable while there is no room."""
        self._run("record", model_id, *(part for one in found for part in (one.event, _recorded(one))))

    def recorded(self, model_ids: Sequence[str]) -> Sequence[Sequence[Recorded]]:
        """The metrics that clients recorded for each run, the oldest first."""
        with self._redis.pipeline(transaction=False) as pipe:
            for model_id in model_ids:
                pipe.xrange(keys.recorded(model_id))
            found = pipe.execute()
        return [[Recorded(*json.loads(fields[b"point"])) for _, fields in rows] for rows in found]

    def note(self, ledger: Ledger, project: str, key: str, text: str, *, urgent: bool = False) -> None:
        """Writes an entry on this hour's page of a project's ledger (app/stores/pages.py), unless the page has an entry
        with this key.

        Raises Unavailable while there is no room, unless the entry is `urgent`.
        """
        self._run("note", ledger, project, key, text, "urgent" if urgent else "")

    def join(self, sampler_id: str) -> int:
        """The number of a further client of a sampling session, from 1 on. Raises NotFound for an unknown session."""
        number = int(self._run("join", sampler_id))
        if not number:
            raise NotFound(f"sampler {sampler_id[:200]!r} does not exist")
        return number

    def now(self) -> float:
        """Unix time in seconds by the server's clock, the only one that decides whether a record has expired."""
        seconds, micros = self._redis.time()
        return seconds + micros / 1e6


def dump_point(point: Point) -> str:
    """A point as a run's stream holds it, beside its kind and its seq."""
    stored = {"metrics": dict(point.metrics), "tokens": point.tokens, "weight": point.weight, "seconds": point.seconds}
    return json.dumps(stored, separators=(",", ":"))


def _load_point(id_: bytes, fields: Mapping[bytes, bytes]) -> Point:
    """The inverse of `dump_point`. A newer worker may have written more than this one knows."""
    at = int(id_.partition(b"-")[0]) / 1000
    known = {name: value for name, value in json.loads(fields[b"point"]).items() if name in _POINT_FIELDS}
    return Point(fields[b"kind"].decode(), seq=int(fields[b"seq"]), at=at, **known)


def _recorded(one: Recorded) -> str:
    return json.dumps([one.step, one.metrics])


def _as_owners(projects: Collection[str]) -> list[str]:
    return [json.dumps(project) for project in sorted(projects)]


def _retained(fields: Record) -> list[str]:
    return [fields.get(name, "") for name in RETAINED]


def _paired(parts: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


@contextmanager
def _outage_tolerated() -> Iterator[None]:
    """Leaves lists as they are on a server that only reads for now: the next reader corrects them."""
    try:
        yield
    except redis.RedisError as error:
        if not is_outage(error):
            raise
