"""Teardown of runs and sessions: an ended run keeps only the checkpoints that its owner saved."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from app import ids
from app.domain.records import Loss, Model, Sampler
from app.errors import Unavailable
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import remove_checkpoint
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import Holder

log = logging.getLogger(__name__)
# Each takes a few scripts and the deletion of its files; the other tasks of the leader wait meanwhile.
_RETIRED_AT_ONCE = 100


class Teardown:
    """Tears down runs and sessions. `wake` makes the trainer that holds a model check at once which memory it can
    free."""

    def __init__(
        self, lifecycle: RedisLifecycle, records: RedisRecords, objects: ObjectStore, wake: Callable[[Holder], None]
    ) -> None:
        self._lifecycle, self._records, self._objects, self._wake = lifecycle, records, objects, wake

    def finish(self, session_id: str, reason: str) -> None:
        """Finishes a session: cancels its samples and releases its models from their trainers' memory. A later Op loads
        a model again."""
        self._lifecycle.finish(session_id, reason)
        self._free(self._models(session_id))
        self._lifecycle.abort_samples(session_id)

    def unload(self, model_id: str) -> None:
        """Releases the model from its trainer's memory once its waiting Ops have run. A later Op loads it again."""
        self._lifecycle.unload(model_id)
        self._free([model_id])

    def end(self, model_id: str) -> None:
        """Ends a model in any session. Files that remain after an outage are deleted by the orphans maintenance
        task."""
        holder = self._lifecycle.end_model(model_id)
        if holder is not None:
            self._clear(model_id, holder, self._lifecycle.adapters(model_id))
            self._lifecycle.abort_samples(ids.session_of(model_id))

    def retire(self, session_id: str, until: float = math.inf) -> None:
        """Tears down the rest of a session that ended long ago, or of a large one a part: call it again until the
        session is gone. After `until` (time.monotonic()) it begins no further run, but always the first. The parts not
        yet deleted stay if the session becomes active again."""
        models = list(islice(self._not_ended(session_id), _RETIRED_AT_ONCE))
        samplers = self._samplers(session_id)
        for place, model_id in enumerate(models):
            if place and time.monotonic() >= until:
                return
            holder = self._lifecycle.end_model(model_id, retired=True)
            if holder is not None:
                self._clear(model_id, holder, _saved_by(model_id, samplers))
        if len(models) == _RETIRED_AT_ONCE:
            return
        for sampler_id, _ in samplers[:_RETIRED_AT_ONCE]:
            self._lifecycle.end_sampler(sampler_id)
        if len(samplers) <= _RETIRED_AT_ONCE and self._lifecycle.forget(session_id):
            # Without the session none of these ids can be used again. The orphans maintenance task removes the runs'
            # records once their files are gone.
            for loss_id in self._records.ids(Loss.namespace, ids.loss_prefix(session_id)):
                self._records.delete(Loss.namespace, loss_id)

    def _free(self, model_ids: list[str]) -> None:
        for holder in set(self._lifecycle.holders(model_ids)):
            self._wake(holder)

    def _not_ended(self, session_id: str) -> Iterator[str]:
        stored = self._records.list(Model.namespace, ids.model_prefix(session_id))
        return (model_id for model_id, fields in stored if "ended" not in fields)

    def _clear(self, model_id: str, holder: Holder, adapters: Mapping[str, str]) -> None:
        """Deletes the files of an ended run, and the sampling sessions of its `adapters` (RedisLifecycle.adapters)."""
        self._lifecycle.end_calls()
        log.info("a run has ended", extra={"model_id": model_id})
        if holder.node:
            self._wake(holder)
        for sampler_id in adapters:
            self._lifecycle.end_sampler(sampler_id, retired=False)
        try:
            for prefix in (f"models/{model_id}/snapshots", *adapters.values()):
                remove_checkpoint(self._objects, prefix)
        except Unavailable as error:
            log.warning("files of an ended run could not be deleted: %s", error, extra={"model_id": model_id})

    def _models(self, session_id: str) -> list[str]:
        return list(self._records.ids(Model.namespace, ids.model_prefix(session_id)))

    def _samplers(self, session_id: str) -> list[tuple[str, Sampler]]:
        stored = self._records.list(Sampler.namespace, ids.sampler_prefix(session_id))
        return [(sampler_id, load(Sampler, fields)) for sampler_id, fields in stored]


def _saved_by(model_id: str, samplers: Iterable[tuple[str, Sampler]]) -> dict[str, str]:
    """Those of a session's samplers that the run saved an adapter for, as of RedisLifecycle.adapters."""
    return {
        sampler_id: sampler.prefix
        for sampler_id, sampler in samplers
        if sampler.prefix.startswith(f"models/{model_id}/") and not sampler.model_path
    }
