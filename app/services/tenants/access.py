"""Access: the only place that loads or lists records for a caller. Missing, foreign and expired records give the same
error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

from app import ids
from app.domain.accounts import Caller, Role
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session, Upload
from app.errors import BadRequest, Forbidden, NotFound, Unauthorized
from app.services.views import Page, check_writable, is_wanted
from app.stores.redis.client import slices
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import Record

Owned = TypeVar("Owned", Session, Model, Sampler, Checkpoint, Upload, Loss)

ListedCheckpoint = tuple[str, Checkpoint]
"""A checkpoint's path and the checkpoint."""

_LONGEST_ID = 512
"""Most characters of an id. A longer one, of which a batch may bring 64 MiB, would only keep the state server busy."""
# Checkpoints of a search that are read at a time, with their sessions.
_SLICE = 100


def load_owned(records: RedisRecords, cls: type[Owned], key: str, caller: Caller) -> Owned:
    """A record that the caller is about to change or to use up. Raises NotFound as `load_readable` does, and Forbidden
    if the caller is only a viewer of its project."""
    found = load_readable(records, cls, key, caller)
    check_role(caller, found.owner)
    return found


def load_readable(records: RedisRecords, cls: type[Owned], key: str, caller: Caller) -> Owned:
    """A record that the caller only reads. Raises NotFound with a text that depends only on the request."""
    found = records.find(cls, key) if len(key) <= _LONGEST_ID else None
    if found is None or not caller.sees(found.owner) or _is_expired(found, records):
        raise missing(cls, key)
    return found


def read_run(records: RedisRecords, model_id: str, caller: Caller) -> Record:
    """All fields of a run that the caller only reads, with those of its journal. Raises NotFound as `load_readable`
    does."""
    stored = records.get(Model.namespace, model_id)
    if stored is None or not caller.sees(load(Model, stored).owner):
        raise missing(Model, model_id)
    return stored


def missing(cls: type[Owned], key: str) -> NotFound:
    """The error of a record that does not exist, with a text that depends only on the request."""
    return NotFound(f"{cls.__name__.lower()} {key[:200]!r} does not exist")


def sampler_exists(sampling_session_seq_id: int) -> BadRequest:
    """The error of a call whose sampling session exists already, and is another one than the call's."""
    return BadRequest(
        f"sampling_session_seq_id {sampling_session_seq_id} was already used for another sampler; use a new one"
    )


def load_checkpoint(records: RedisRecords, path: ids.TinkerPath, caller: Caller) -> Checkpoint:
    """A checkpoint to read or to start from: one of the caller's, or a public one. Raises NotFound as `load_readable`
    does."""
    return find_public(records, path) or load_readable(records, Checkpoint, str(path), caller)


def find_public(records: RedisRecords, path: ids.TinkerPath) -> Checkpoint | None:
    """The checkpoint, if it is published."""
    found = records.find(Checkpoint, str(path))
    return None if found is None or not found.public or _is_expired(found, records) else found


def list_run_checkpoints(
    records: RedisRecords, model_ids: Sequence[str], caller: Caller, *, newest: bool
) -> list[list[ListedCheckpoint]]:
    """For each run its checkpoints that the caller may read; of another project's run these are the public ones. Newest
    first and without the expired ones, as in `list_checkpoints`. With `newest` there may be only the newest of each
    kind."""
    prefixes = [ids.checkpoint_path_prefix(model_id) for model_id in model_ids]
    stored = records.readable_checkpoints(prefixes, caller.roles.keys(), newest=newest)
    return [_newest_first(records, found.items()) for found in stored]


def list_checkpoints(records: RedisRecords, projects: Set[str]) -> list[ListedCheckpoint]:
    """The checkpoints of all runs in the projects, newest first and without the expired ones. An index names them: no
    other checkpoint is read."""
    return _newest_first(records, records.list_checkpoints(projects).items())


def list_fields(records: RedisRecords, projects: Set[str], *names: str) -> dict[str, Record]:
    """Some fields of the checkpoints of `list_checkpoints`, by path. Thousands are listed in a tenth of the time."""
    found = records.list_checkpoints(projects, ("expires_at", *names))
    ends = {path: float(at) for path, fields in found.items() if (at := fields.get("expires_at", "null")) != "null"}
    if ends:
        now = records.now()
        return {path: fields for path, fields in found.items() if ends.get(path, math.inf) > now}
    return dict(found)


def page_of_checkpoints(
    records: RedisRecords, projects: Set[str], page: Page
) -> tuple[list[ListedCheckpoint], dict[str, int]]:
    """A page of `list_checkpoints`, and its cursor. Only the checkpoints on the page are read whole."""
    created = {path: float(fields["created"]) for path, fields in list_fields(records, projects, "created").items()}
    shown, cursor = page.of(sorted(created, key=lambda path: (-created[path], path)))
    return _read(records, projects, shown), cursor


def first_wanted(
    records: RedisRecords,
    caller: Caller,
    owner: Mapping[str, Any],
    projects: Set[str],
    paths: Sequence[str],
    most: int,
) -> list[ListedCheckpoint]:
    """The first `most` of these checkpoints of the projects that the `owner` of a search includes. Only these and some
    of the next are read, and of their sessions each once."""
    found: list[ListedCheckpoint] = []
    users: dict[str, str] = {}
    for some in slices(paths, _SLICE):
        listed = _read(records, projects, some)
        if owner["type"] != "accessible":
            session_of = {path: ids.session_of(one.model_id) for path, one in listed}
            users |= users_of(records, set(session_of.values()) - users.keys())
            listed = [
                (path, one) for path, one in listed if is_wanted(caller, owner, users[session_of[path]], one.owner)
            ]
        found += listed
        if len(found) >= most:
            break
    return found[:most]


def _read(records: RedisRecords, projects: Set[str], paths: Sequence[str]) -> list[ListedCheckpoint]:
    """The listed checkpoints that are still there and in the projects."""
    found = [(path, load(Checkpoint, fields)) for path, fields in records.read(Checkpoint.namespace, paths) if fields]
    return [(path, one) for path, one in found if one.owner in projects]


def users_of(records: RedisRecords, sessions: Set[str]) -> dict[str, str]:
    """The user who opened each session; empty for an unknown user."""
    found = records.read(Session.namespace, sorted(sessions))
    return {id_: json.loads(fields.get("user", '""')) for id_, fields in found}


def _newest_first(records: RedisRecords, stored: Iterable[tuple[str, Record]]) -> list[ListedCheckpoint]:
    found = [(path, load(Checkpoint, fields)) for path, fields in stored]
    if any(one.expires_at is not None for _, one in found):
        now = records.now()
        found = [(path, one) for path, one in found if not one.is_expired(now)]
    return sorted(found, key=lambda pair: (-pair[1].created, pair[0]))


def check_role(caller: Caller, project: str, role: Role = "member") -> None:
    """Raises Forbidden if the caller's role is below `role`. The caller sees the project, or it is the project of the
    caller's key."""
    if not caller.may(role, project):
        had = caller.roles[project] if caller.sees(project) else "none"
        raise Forbidden(f"this needs the role {role} in project {project}; your role is {had}")


def project_to_write(caller: Caller, asked: str | None) -> str:
    """The project in which a call creates something: the `asked` one, or the project of the caller's key. Raises
    NotFound for an asked one to which the caller may not write, whether it exists or not, and Forbidden if the caller
    may not write to the key's own."""
    if asked is not None:
        return check_writable(caller, asked)
    check_role(caller, caller.project)
    return caller.project


def _is_expired(found: Session | Model | Sampler | Checkpoint | Upload | Loss, records: RedisRecords) -> bool:
    """True for an expired checkpoint or upload. Most checkpoints have no expiry; the time is read only for one that
    has."""
    return isinstance(found, Checkpoint | Upload) and found.expires_at is not None and found.is_expired(records.now())


class Sources:
    """Finds the source checkpoint of a load or a copy. A weights_access_token is another user's API key, or a token
    made from one. A checkpoint that the key's owner may read can be loaded or copied with it. The token needs no scope,
    since every key may read, and it is stored nowhere."""

    def __init__(self, records: RedisRecords, authenticator: Callable[[str], Caller]) -> None:
        self._records, self._authenticator = records, authenticator

    def find(self, path: ids.TinkerPath, caller: Caller, token: str | None) -> Checkpoint:
        """The checkpoint. Raises NotFound with the same text for a missing checkpoint and for one that neither the
        caller nor the token may read, BadRequest for a token that is no key, and Unavailable."""
        try:
            return load_checkpoint(self._records, path, caller)
        except NotFound:
            if token is None:
                raise
        try:
            holder = self._authenticator(token)
        except Unauthorized as error:
            raise BadRequest(f"the weights_access_token is not valid: {error}") from None
        return load_checkpoint(self._records, path, holder)
