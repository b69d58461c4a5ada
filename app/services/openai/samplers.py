"""From a model's name to what samples it: a sampler of the caller's project, made on first use."""

from __future__ import annotations

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Checkpoint, Sampler, Session
from app.errors import NotFound
from app.services.base_models import BaseModels, sampler_role
from app.services.ownership import check_role
from app.services.sampling import SamplingService
from app.stores.interfaces import Lifecycle, Records

_SCHEME = "tinker://"
_KIND = "sampler_weights"


class Samplers:
    """All of a project's are in one session, which every request keeps alive."""

    def __init__(self, store: Records, lifecycle: Lifecycle, bases: BaseModels, sampling: SamplingService) -> None:
        self._records, self._lifecycle, self._bases, self._sampling = store, lifecycle, bases, sampling

    def of(self, caller: Caller, model: str) -> tuple[str, Sampler]:
        """(id, sampler) of a base model, a tinker:// path, or "<base>;<path>"; nothing is stored.

        Another save under a path is another sampler. Raises Forbidden, NotFound (model, foreign and missing paths
        alike) or BadRequest for a path that cannot be sampled.
        """
        check_role(caller, caller.project)
        base, path = _parts(model)
        served = self._bases.names()
        if base is not None and base not in served:
            raise NotFound(f"model {base[:200]!r} is not served here; known are: {', '.join(served)}")
        session_id = ids.openai_session_id(caller.project)
        sampler = self._sampling.resolve(caller, caller.project, session_id, base, path)
        return ids.openai_sampler_id(session_id, sampler.base_model, sampler.prefix), sampler

    def ensure(self, sampler_id: str, sampler: Sampler) -> None:
        """Store it, unless it is there. Raises Unavailable while there is no room for another."""
        if self._records.get(Sampler.namespace, sampler_id) is not None:
            return
        session = Session(sampler.owner, self._records.now(), display_name="OpenAI-compatible calls")
        self._records.put_new(Session.namespace, sampler.session_id, records.dump(session))
        self._lifecycle.heartbeat(sampler.session_id)
        self._records.put_new(Sampler.namespace, sampler_id, records.dump(sampler))

    def models(self, caller: Caller) -> list[tuple[str, float]]:
        """(name, when it was made) of the base models and the caller's sampler checkpoints that have a live sampler."""
        live, now = self._bases.live(), self._records.now()
        found = [(name, 0.0) for name in self._bases.names() if ("sampler", name) in live]
        for path, fields in self._records.list(Checkpoint.namespace):
            checkpoint = records.load(Checkpoint, fields)
            sampled = (sampler_role(full=checkpoint.full), checkpoint.base_model) in live
            theirs = checkpoint.kind == _KIND and caller.sees(checkpoint.owner)
            if sampled and theirs and not checkpoint.is_expired(now):
                found.append((path, checkpoint.created))
        return found

    def keep_alive(self, caller: Caller) -> None:
        """While a request runs, its session does not expire."""
        self._lifecycle.heartbeat(ids.openai_session_id(caller.project))


def _parts(model: str) -> tuple[str | None, str | None]:
    """(base model, path), each None if it was not given."""
    if model.startswith(_SCHEME):
        return None, model
    base, between, path = model.partition(f";{_SCHEME}")
    return base, _SCHEME + path if between else None
