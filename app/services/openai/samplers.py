"""The samplers of OpenAI-compatible calls: those that a call can name as its model, and their records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Checkpoint, Sampler, Session
from app.errors import NotFound
from app.services.base_models import BaseModels, sampler_role
from app.services.sampling import SamplingService
from app.services.tenants.access import check_role, list_fields, load_readable
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump

_SCHEME = "tinker://"
_KIND = "sampler_weights"
_SELECTING = ("kind", "base_model", "lora")
"""The fields of a checkpoint that decide if it can be sampled from."""


class Samplers:
    """Finds and stores the samplers of OpenAI-compatible calls. All of a project's samplers are in one session, which
    every request keeps alive."""

    def __init__(
        self, records: RedisRecords, lifecycle: RedisLifecycle, bases: BaseModels, sampling: SamplingService
    ) -> None:
        self._records, self._lifecycle, self._bases, self._sampling = records, lifecycle, bases, sampling

    def of(self, caller: Caller, model: str) -> tuple[str, Sampler]:
        """(id, sampler) of a base model, a tinker:// path, or "<base>;<path>"; nothing is stored.

        A new save under the same path is a different sampler. Raises Forbidden, NotFound (model, and missing
        paths and unpublished ones of others with the same text), or BadRequest for a path that cannot be sampled.
        """
        check_role(caller, caller.project)
        base, path = _parts(model)
        served = self._bases.names()
        if base is not None and base not in served:
            raise NotFound(f"model {base[:200]!r} is not served here; the served models are: {', '.join(served)}")
        session_id = ids.openai_session_id(caller.project)
        sampler = self._sampling.resolve(caller, caller.project, session_id, base, path)
        return ids.openai_sampler_id(session_id, sampler.base_model, sampler.prefix), sampler

    def ensure(self, sampler_id: str, sampler: Sampler) -> None:
        """Stores the sampler, unless it exists, and notes its use, so that maintenance does not end it before the next
        request is admitted. Raises Unavailable while there is no room for another."""
        if self._lifecycle.use_sampler(sampler_id):
            return
        session = Session(sampler.owner, self._records.now(), display_name="OpenAI-compatible calls")
        self._records.put_new(Session.namespace, sampler.session_id, dump(session))
        self._lifecycle.heartbeat(sampler.session_id)
        self._records.put_new(Sampler.namespace, sampler_id, dump(sampler))

    def models(self, caller: Caller) -> list[tuple[str, float]]:
        """(name, creation time) of the base models and the caller's sampler checkpoints that have a live sampler."""
        live = self._bases.live()
        found = [(name, 0.0) for name in self._bases.names() if ("sampler", name) in live]
        names = ("created", *_SELECTING)
        for path, fields in sorted(list_fields(self._records, caller.roles.keys(), *names).items()):
            if _is_sampled(*(json.loads(fields[name]) for name in _SELECTING), live=live):
                found.append((path, json.loads(fields["created"])))
        return found

    def created(self, caller: Caller, name: str) -> float | None:
        """The creation time of the one of these `models` with this name; None if there is none."""
        live = self._bases.live()
        if name in self._bases.names():
            return 0.0 if ("sampler", name) in live else None
        try:
            found = load_readable(self._records, Checkpoint, name, caller)
        except NotFound:
            return None
        return found.created if _is_sampled(found.kind, found.base_model, found.lora, live=live) else None

    def keep_alive(self, caller: Caller) -> None:
        """Keeps the caller's session alive while a request runs."""
        self._lifecycle.heartbeat(ids.openai_session_id(caller.project))


def _is_sampled(kind: str, base_model: str, lora: Mapping[str, Any], *, live: Set[tuple[str, str]]) -> bool:
    """True for a checkpoint with these fields to sample from, if its sampler is among the `live` ones."""
    return kind == _KIND and (sampler_role(full=not lora), base_model) in live


def _parts(model: str) -> tuple[str | None, str | None]:
    """(base model, path), each None if it was not given."""
    if model.startswith(_SCHEME):
        return None, model
    base, between, path = model.partition(f";{_SCHEME}")
    return base, _SCHEME + path if between else None
