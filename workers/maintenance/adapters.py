"""Gives up old adapters of saves without a path, and counts the bytes of the others for their projects and keys. Ends
the unused samplers of OpenAI-compatible calls.

A training loop saves an adapter for its samplers at every step. The newest ones of each run stay, and those in use: an
unfinished request needs them, or their sampling session was made or used within `engine.ephemeral_s`.

One atomic step gives an adapter up, if no request came meanwhile; new requests are refused from then on. Its files are
deleted after that step. If that fails, nothing refers to them, and the orphans task removes them (orphans.py). Its
sampling session stays for as long as an unread result and as routes: results of its last requests are polled through
it, a batch reads their routes through it, and late requests get the reason. That of an in-flight client stays with its
run, because it samples the newest weights.

An OpenAI-compatible call makes a sampler for each new save, and makes it again when it has ended. It ends when it was
not used within `engine.ephemeral_s`: it would keep the files of a save that was replaced, deleted or has expired.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app import ids
from app.domain.checkpoints import CheckpointPrefix
from app.domain.limits import KEY, PROJECT
from app.domain.records import Model, Sampler
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import remove_checkpoint
from app.stores.objects.routes import LONGEST_S
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, load

log = logging.getLogger(__name__)
_PERIOD_S = 60.0
# A round reads every sampling session, 10,000 in about a second. It takes a fiftieth of the time at most.
_PAUSES = 50


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a save without a path. `size`: its bytes; 0 if a process of an earlier version saved it."""

    sampler_id: str
    sampler: Sampler
    place: CheckpointPrefix
    size: int

    @classmethod
    def of(cls, sampler_id: str, sampler: Sampler, fields: Mapping[str, str]) -> Adapter | None:
        """The adapter of a sampling session; None if it has a path, has none, or was given up."""
        place = CheckpointPrefix.parse(sampler.prefix)
        if sampler.model_path or place is None or "given_up" in fields:
            return None
        return cls(sampler_id, sampler, place, int(fields.get("size_bytes", 0)))


class EphemeralAdapters:
    """The maintenance task. It may run twice at once."""

    def __init__(
        self,
        lifecycle: RedisLifecycle,
        records: RedisRecords,
        objects: ObjectStore,
        settings: EngineSettings,
    ) -> None:
        self._lifecycle, self._records, self._objects = lifecycle, records, objects
        self._most, self._keep_s = settings.ephemeral_adapters, max(settings.result_unread_s, LONGEST_S)
        self._next = 0.0

    def sweep(self) -> None:
        """Runs one round, if it is due. Raises Unavailable."""
        started = time.monotonic()
        if started < self._next:
            return
        runs, openai, obsolete = self._samplers()
        given_up = self._give_up_and_count(runs)
        if ended := self._lifecycle.end_unused_samplers(openai):
            log.info("ended %d unused samplers of OpenAI-compatible calls", ended)
        if ended := self._lifecycle.end_unused_samplers(obsolete, copies=False):
            log.info("removed %d sampling sessions of adapters that were deleted long ago", ended)
        self._delete(given_up)
        self._next = time.monotonic() + max(_PERIOD_S, _PAUSES * (time.monotonic() - started))

    def _samplers(self) -> tuple[Mapping[str, Sequence[Adapter]], Sequence[str], Sequence[str]]:
        """The adapters of each run, the newest first, the samplers of OpenAI-compatible calls that name a save, and
        those of adapters that were given up long ago."""
        runs: defaultdict[str, list[Adapter]] = defaultdict(list)
        openai: list[str] = []
        obsolete: list[str] = []
        before = (self._records.now() - self._keep_s) * 1000
        for sampler_id, fields in self._records.list(Sampler.namespace):
            sampler = load(Sampler, fields)
            if adapter := Adapter.of(sampler_id, sampler, fields):
                runs[adapter.place.model_id].append(adapter)
            elif _is_of_openai(sampler_id, sampler):
                openai.append(sampler_id)
            elif not sampler.follows and "given_up" in fields and int(fields["given_up"]) < before:
                obsolete.append(sampler_id)
        for adapters in runs.values():
            adapters.sort(key=lambda adapter: (adapter.place.epoch, adapter.place.seq), reverse=True)
        return runs, openai, obsolete

    def _give_up_and_count(self, runs: Mapping[str, Sequence[Adapter]]) -> Sequence[Adapter]:
        """Gives up the old adapters of all runs, and counts the bytes of the others. Returns those given up."""
        models = dict(self._records.read(Model.namespace, list(runs)))
        sizes: Counter[str] = Counter()
        given_up: list[Adapter] = []
        for model_id, adapters in runs.items():
            gone = set(self._give_up(model_id, models[model_id], adapters))
            for adapter in adapters:
                if adapter.sampler_id in gone:
                    given_up.append(adapter)
                else:
                    sizes.update(dict.fromkeys(_payers(adapter, models[model_id]), adapter.size))
        self._lifecycle.count_adapters(sizes)
        return given_up

    def _give_up(self, model_id: str, model: Mapping[str, str], adapters: Sequence[Adapter]) -> Sequence[str]:
        """Gives up what is old and not in use. Returns the sampling sessions.

        Requests of other sessions may run on in-flight weights. None can begin there once newer ones are saved, so the
        reads need no lock: first the newest weights, as `model` has them, then the requests.
        """
        newest = json.loads(model.get("inflight", '""'))
        old = [adapter for adapter in adapters[self._most :] if adapter.sampler.prefix != newest]
        if any(adapter.sampler.follows for adapter in old):
            in_use = self._lifecycle.adapters_in_use(ids.session_of(model_id))
            old = [adapter for adapter in old if adapter.sampler.prefix not in in_use]
        return self._lifecycle.give_up_adapters([adapter.sampler_id for adapter in old])

    def _delete(self, adapters: Sequence[Adapter]) -> None:
        for adapter in adapters:
            remove_checkpoint(self._objects, adapter.sampler.prefix)
        if adapters:
            log.info("deleted %d old adapters of saves without a path", len(adapters))


def _is_of_openai(sampler_id: str, sampler: Sampler) -> bool:
    made = ids.openai_sampler_id(sampler.session_id, sampler.base_model, sampler.prefix)
    return bool(sampler.prefix) and sampler_id == made


def _payers(adapter: Adapter, model: Mapping[str, str]) -> Iterator[str]:
    yield f"{PROJECT}:{adapter.sampler.owner}"
    if key := json.loads(model.get("key", '""')):
        yield f"{KEY}:{key}"
