"""Calls of one model, as its client makes them, and the promises that hold for them whatever happens to the workers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import dataclass, field

import pytest

from app.domain.ops import FORWARD_BACKWARD, LoadWeights, Op, OptimStep, SaveWeights
from app.domain.records import Checkpoint, Sampler, ShmTransfer
from app.domain.results import Result
from app.errors import BadRequest
from app.stores.redis import keys
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import RefusalKind
from tests.property.reference import Reference
from tests.property.vector_backend import BREAKING, POISON, State, backward, optim_step
from tests.property.world import CREATE, TrainerWorld
from workers.backends.training.base import ADAPTER_FILE
from workers.checkpoints import transfer

# Relative to a gradient's size, for shared passes.
_BOUND = 1e-5


@dataclass
class Client:
    """Client of one model. `plan` is its calls, in order; `seen` is every result it has read."""

    world: TrainerWorld
    model: str
    plan: dict[int, Op] = field(default_factory=lambda: {0: CREATE})
    admitted: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    seen: dict[int, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._applied, self._snapshot = -1, ""
        self._numbers = itertools.count(1)
        self.admit(0)

    @property
    def last(self) -> int:
        return max(self.admitted)

    def call(self, kind: str) -> int:
        """Returns the seq of a call that is not sent yet."""
        seq = max(self.plan) + 1
        self.plan[seq] = self._op(kind)
        return seq

    def admit(self, seq: int) -> None:
        if seq in self.refused:
            with pytest.raises(BadRequest):
                self.world.admit(seq, self.plan[seq], self.model)
            return
        assert self.world.admit(seq, self.plan[seq], self.model) == (seq not in self.admitted)
        self.admitted.add(seq)

    def refuse(self, seq: int, kind: RefusalKind) -> None:
        withheld = seq in self.plan and seq not in self.admitted
        if withheld and self.world.oplog.refuse(self.model, seq, _reason(seq), kind):
            self.refused[seq] = kind

    def each_success_has_one_point(self) -> None:
        """The run's progress has each batch and step that did not fail, once and in order."""
        [found] = RedisRecords(self.world.client).progress([self.model], 10_000)
        trained = [
            seq
            for seq, result in sorted(self.seen.items())
            if not result.failed and self.plan[seq].kind in (FORWARD_BACKWARD, OptimStep.kind)
        ]
        assert [point.seq for point in found.points] == trained
        assert found.steps == sum(self.plan[seq].kind == OptimStep.kind for seq in trained)

    def what_was_applied_has_a_result(self) -> None:
        """Every applied Op has a result, every other Op has none, and no result ever changes."""
        applied = self.world.applied(self.model)
        assert applied >= self._applied
        for seq in range(self._applied + 1, applied + 1):
            found = self.world.result(seq, self.model)
            assert (found is None) == (seq in self.refused)
            if found is not None:
                self.seen[seq] = found
        self._applied = applied
        for seq in range(applied + 1, max(self.plan) + 1):
            assert self.world.result(seq, self.model) is None

    def a_new_owner_finds_all_it_needs(self) -> None:
        client, key = self.world.client, keys.model(self.model)
        snapshot, at = (x.decode() for x in client.hmget(key, ["snapshot", "snapshot_seq"]))
        applied = self.world.applied(self.model)
        behind = client.zcount(keys.journal(self.model), f"({at}", applied)
        assert behind == applied - int(at), "an Op is in no snapshot and no journal"
        if snapshot != self._snapshot:
            manifest = transfer.read_manifest(self.world.store, snapshot)
            assert manifest.seq == int(at)
            for name, entry in manifest.files.items():
                assert len(self.world.store.read(f"{snapshot}/{name}")) == entry.size
            self._snapshot = snapshot

    def check_results(self) -> None:
        for seq, result in self.seen.items():
            assert self.world.result(seq, self.model) == result, f"the result of seq {seq} changed"

    def compare(self, found: State, *, exact: bool, bound: bool, calm: bool) -> None:
        """Compares `found`, the final model, with the reference: to the bit, or within a `bound`.

        With `calm`, no Op was given up that did not break anything itself.
        """
        reference = Reference(self.model, exact)
        for seq, op in self.plan.items():
            if seq in self.refused:
                reference.consumed(self.refused[seq], _reason(seq))
            else:
                self._check_failure(op, self.seen[seq], calm)
                reference.ran(seq, op, self.seen[seq])
        wanted = reference.state
        assert (found.steps, found.pending) == (wanted.steps, wanted.pending), "effects counted once"
        if exact:
            assert found == wanted
        if bound:
            for name in ("weight", "moment", "gradient"):
                assert math.isclose(getattr(found, name), getattr(wanted, name), rel_tol=_BOUND, abs_tol=_BOUND)

    def check_sampler_saves(self, exact: bool) -> None:
        """Checks that each adapter given to a sampler is in the object store, and is the model at that save."""
        reference = Reference(self.model, exact)
        assert not list(self.world.records.list(ShmTransfer.namespace, f"models/{self.model}/"))
        for seq, op in self.plan.items():
            if seq in self.refused:
                reference.consumed(self.refused[seq], _reason(seq))
                continue
            reference.ran(seq, op, self.seen[seq])
            if isinstance(op, SaveWeights) and op.sampling_session_id and not self.seen[seq].failed:
                self._check_sampler_save(op.sampling_session_id, reference.state, exact)

    def _check_sampler_save(self, sampler: str, wanted: State, exact: bool) -> None:
        stored = self.world.records.get(Sampler.namespace, sampler)
        assert stored is not None, f"{sampler} is not known"
        prefix = load(Sampler, stored).prefix
        manifest = transfer.read_manifest(self.world.store, prefix)
        content = self.world.store.read(f"{prefix}/{ADAPTER_FILE}")
        assert hashlib.sha256(content).hexdigest() == manifest.files[ADAPTER_FILE].sha256, "two writers' files"
        adapter = json.loads(content)
        assert adapter["steps"] == wanted.steps, "effects counted once"
        if exact:
            assert float.fromhex(adapter["weight"]) == wanted.weight

    def _sampler(self, number: int) -> str:
        return f"{self.model.replace('train', 'sample')}{number:03}"

    def _op(self, kind: str) -> Op:
        number = next(self._numbers)
        match kind:
            case "load":
                stored = dict(self.world.records.list(Checkpoint.namespace, f"tinker://{self.model}/"))
                path = max(stored, default="tinker://nobody:train:0/weights/none")
                prefix = load(Checkpoint, stored[path]).prefix if stored else "models/none"
                return LoadWeights(path, optimizer=number % 2 == 0, prefix=prefix)
            case "step":
                return optim_step()
            case "save for sampling":
                return SaveWeights(
                    "sampler_weights", f"ephemeral-{number:03}", sampling_session_id=self._sampler(number)
                )
            case "save":
                return SaveWeights("weights", f"save-{number:03}")
            case "forward":
                return backward(number, forward_only=True)
            case "poison" | "breaking":
                return backward(number, {"poison": POISON, "breaking": BREAKING}[kind])
        return backward(number)

    def _check_failure(self, op: Op, result: Result, calm: bool) -> None:
        loss = getattr(op, "loss_fn", "")
        assert result.failed or loss not in (POISON, BREAKING)
        if result.failed and json.loads(result.body)["category"] == "server":
            assert loss == BREAKING or not calm, "nothing went wrong, yet an Op was given up"


def _reason(seq: int) -> str:
    """The reason of a refusal."""
    return f"no {seq}"
