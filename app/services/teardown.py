"""Teardown of runs and sessions: an ended run keeps only the checkpoints that its owner saved."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice

from app import ids
from app.domain.checkpoints import MODELS, SNAPSHOT
from app.domain.records import Model, Sampler
from app.errors import Unavailable
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import remove_checkpoint
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import Holder

log = logging.getLogger(__name__)
# Runs: each takes a few scripts and the deletion of its files; the other tasks of the leader wait meanwhile.
_RETIRED_AT_ONCE = 100
# Samplers without files, in one script.
_ENDED_AT_ONCE = 200


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
        self._free(self._records.ids(Model.namespace, ids.model_prefix(session_id)))
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
            self._release(model_id, holder)
            files = self._end_samplers(self._lifecycle.adapters(model_id), retired=False)
            self._delete(_snapshots(model_id), *files)
            self._lifecycle.abort_samples(ids.session_of(model_id))

    def retire(self, session_id: str, until: float = math.inf) -> None:
        """Tears down the rest of a session that ended long ago, or of a large one a part: call it again until the
        session is gone. After `until` (time.monotonic()) it begins no further step, but always the first. The parts not
        yet deleted stay if the session becomes active again."""
        runs = list(islice(self._not_ended(session_id), _RETIRED_AT_ONCE))
        steps: Iterator[Callable[[], None]] = chain(
            (partial(self._retire_run, model_id) for model_id in runs),
            (partial(self._retire_samplers, some) for some in self._samplers(session_id)),
        )
        for place, step in enumerate(steps):
            if place and time.monotonic() >= until:
                return
            step()
        if len(runs) == _RETIRED_AT_ONCE:
            return
        # Without the session none of its ids can be used again. The orphans maintenance task removes the runs' records
        # once their files are gone.
        while self._lifecycle.forget(session_id) is None and time.monotonic() < until:
            pass

    def _free(self, model_ids: Iterable[str]) -> None:
        for holder in set(self._lifecycle.holders(model_ids)):
            self._wake(holder)

    def _not_ended(self, session_id: str) -> Iterator[str]:
        stored = self._records.list(Model.namespace, ids.model_prefix(session_id))
        return (model_id for model_id, fields in stored if "ended" not in fields)

    def _samplers(self, session_id: str) -> Iterator[dict[str, str]]:
        """Yields the session's samplers in parts that take about as long to end: many without files, or one with the
        prefix of its files."""
        many: dict[str, str] = {}
        for sampler_id, fields in self._records.list(Sampler.namespace, ids.sampler_prefix(session_id)):
            sampler = load(Sampler, fields)
            if sampler.prefix and not sampler.model_path and "given_up" not in fields:
                yield {sampler_id: sampler.prefix}
                continue
            many[sampler_id] = ""
            if len(many) == _ENDED_AT_ONCE:
                yield many
                many = {}
        if many:
            yield many

    def _retire_samplers(self, adapters: Mapping[str, str]) -> None:
        self._delete(*self._end_samplers(adapters, retired=True))

    def _retire_run(self, model_id: str) -> None:
        holder = self._lifecycle.end_model(model_id, retired=True)
        if holder is not None:
            self._release(model_id, holder)
            self._delete(_snapshots(model_id))

    def _release(self, model_id: str, holder: Holder) -> None:
        self._lifecycle.end_calls()
        log.info("a run has ended", extra={"model_id": model_id})
        if holder.node:
            self._wake(holder)

    def _end_samplers(self, adapters: Mapping[str, str], *, retired: bool) -> list[str]:
        """Ends samplers (as of RedisLifecycle.adapters), and returns the prefixes of the files to delete."""
        self._lifecycle.end_samplers(
            [sampler_id for sampler_id, prefix in adapters.items() if not prefix], retired=retired
        )
        with_files = [(sampler_id, prefix) for sampler_id, prefix in adapters.items() if prefix]
        return [prefix for sampler_id, prefix in with_files if self._lifecycle.end_sampler(sampler_id, retired=retired)]

    def _delete(self, *prefixes: str) -> None:
        try:
            for prefix in prefixes:
                remove_checkpoint(self._objects, prefix)
        except Unavailable as error:
            log.warning("files of an ended run or sampler could not be deleted: %s", error)


def _snapshots(model_id: str) -> str:
    return f"{MODELS}/{model_id}/{SNAPSHOT}"
