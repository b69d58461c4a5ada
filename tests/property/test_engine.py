"""Workers crash, sleep, lose answers and stores, clients send in any order: each Op still has its effect once."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.domain.ops import LoadWeights, Op, SaveWeights
from app.domain.records import Checkpoint, load
from app.domain.results import Result
from app.errors import BadRequest
from app.stores.interfaces import RefusalKind
from app.stores.redis import keys
from tests.property.faults import Fault
from tests.property.reference import Reference
from tests.property.runs import run_machine
from tests.property.vector_backend import BREAKING, POISON, backward, optim_step
from tests.property.world import CREATE, MODEL, Trainer, TrainerWorld
from workers import checkpoints

NODES = ("a", "b")
KINDS = st.sampled_from(
    ["backward", "backward", "backward", "step", "step", "forward", "save", "load", "poison", "breaking"]
)
FAULTS = st.sampled_from([Fault.NONE, Fault.NONE, *Fault])
# An Op makes up to nine calls to the outside, a restore some more.
CALLS = st.integers(0, 12)
OFFSETS = st.integers(0, 4)
TROUBLES = st.sampled_from(["restart", "stop", "idle", "lapse", "renew", "zombie", "lag", "catch up"])
REFUSALS = st.sampled_from(get_args(RefusalKind))
RING_LIMIT = 60


class EngineMachine(RuleBasedStateMachine):
    """`exact` or noisy. `done` counts what really happened over all examples: a run that disturbs nothing proves
    nothing."""

    client: redis.Redis
    folder: Path
    exact: bool
    hit: Counter[Fault]
    done: Counter[str]

    @initialize(seed=st.integers(0, 99))
    def start(self, seed: int) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self.folder))
        noise = None if self.exact else random.Random(seed)
        self.world = TrainerWorld(self.client, self.place, noise, self.hit)
        self.plan: dict[int, Op] = {0: CREATE}
        self.admitted: set[int] = set()
        self.refused: dict[int, str] = {}
        self.seen: dict[int, Result] = {}
        self.applied, self.snapshot = -1, ""
        self.numbers = itertools.count(1)
        self.trainers = {node: self.world.trainer(node) for node in NODES}
        self.zombies: list[Trainer] = []
        self.troubles = 0
        self._admit(0)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._finish()
            self._compare()
        finally:
            self.world.stop()
            shutil.rmtree(self.place)

    # What clients do.

    @rule(what=st.sampled_from(["later", "again", "again", "refuse"]), kind=KINDS, pick=OFFSETS, refusal=REFUSALS)
    def a_client_is_odd(self, what: str, kind: str, pick: int, refusal: RefusalKind) -> None:
        """A call that will come out of order; calls that come `again`, or late; one that is refused or given up."""
        match what:
            case "later":
                self._call(kind)
            case "again":
                self._admit(sorted(self.plan)[-1 - pick % len(self.plan)])
            case "refuse":
                seq = self.world.applied() + 1 + pick
                withheld = seq in self.plan and seq not in self.admitted
                if withheld and self.world.oplog.refuse(MODEL, seq, f"no {seq}", refusal):
                    self.refused[seq] = refusal

    # What happens to workers.

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=3), node=st.sampled_from(NODES), fault=FAULTS, at=CALLS)
    def call_and_ring(self, kinds: list[str], node: str, fault: Fault, at: int) -> None:
        for kind in kinds:
            self._admit(self._call(kind))
        self._ring_with(node, max(self.admitted), fault, at)

    @rule(pick=OFFSETS, node=st.sampled_from(NODES), fault=FAULTS, at=CALLS)
    def ring(self, pick: int, node: str, fault: Fault, at: int) -> None:
        self._ring_with(node, sorted(self.admitted)[-1 - pick % len(self.admitted)], fault, at)

    @rule(node=st.sampled_from(NODES), what=TROUBLES, offset=OFFSETS)
    def trouble(self, node: str, what: str, offset: int) -> None:
        """`restart`: another process takes the node's place, and the one before may go on for a while (`zombie`), with
        snapshots that come late. `stop`: it ends in order. `renew`: what the keeper's own thread does.
        """
        trainer = self.trainers[node]
        match what:
            case "restart":
                self.zombies.append(trainer)
                self._restart(node)
            case "stop":
                trainer.drain.in_order(1.0)
                self._restart(node)
            case "idle":
                trainer.owner.part_with(MODEL)
            case "lag":
                trainer.background.lags = True
            case "catch up":
                for late in (trainer, *self.zombies):
                    late.background.catch_up()
            case "lapse":
                self.troubles += 1
                self.world.lapse()
            case "renew":
                trainer.keeper._renew()
            case "zombie" if self.zombies:
                self._ring(self.zombies[-1], self.world.applied() + offset)

    # What must hold.

    @invariant()
    def what_was_applied_has_a_result(self) -> None:
        applied = self.world.applied()
        assert applied >= self.applied
        for seq in range(self.applied + 1, applied + 1):
            found = self.world.result(seq)
            assert (found is None) == (seq in self.refused)
            if found is not None:
                self.seen[seq] = found
        self.applied = applied
        assert self.world.result(applied + 1) is None

    @invariant()
    def a_new_owner_finds_all_it_needs(self) -> None:
        snapshot, at = (x.decode() for x in self.client.hmget(keys.model(MODEL), ["snapshot", "snapshot_seq"]))
        applied = self.world.applied()
        behind = self.client.zcount(keys.journal(MODEL), f"({at}", applied)
        assert behind == applied - int(at), "an Op is in no snapshot and no journal"
        if snapshot != self.snapshot:
            manifest = checkpoints.read_manifest(self.world.store, snapshot)
            assert manifest.seq == int(at)
            for name, entry in manifest.files.items():
                assert len(self.world.store.read(f"{snapshot}/{name}")) == entry.size
            self.snapshot = snapshot

    def _others_go_on(self) -> None:
        """While one worker sleeps past its lease."""
        self.troubles += 1
        self.world.lapse()
        heir = self.world.trainer("heir")
        self._ring(heir, max(self.admitted))
        self.zombies.append(heir)
        self.world.lapse()

    def _ring_with(self, node: str, seq: int, fault: Fault, at: int) -> None:
        trainer = self.trainers[node]
        trainer.faults.plan(fault, at, self._others_go_on)
        self._ring(trainer, seq)
        trainer.faults.plan(Fault.NONE, 0)
        if trainer.faults.dead:
            self._restart(node)

    def _ring(self, trainer: Trainer, seq: int) -> None:
        if seq < 0 or not (seq in self.admitted or seq in self.refused):
            return
        before = self.world.applied()
        result = trainer.ring(seq)
        if result is not None and seq in self.admitted:
            assert result == self.world.result(seq), "the answer of a doorbell is the visible one"
        else:
            self.troubles += 1
        self.done["ran"] += self.world.applied() > before

    def _restart(self, node: str) -> None:
        self.troubles += 1
        self.trainers[node] = self.world.trainer(node, snapshots=self.troubles % 3 > 0, fragile=self.troubles % 2 > 0)

    def _call(self, kind: str) -> int:
        seq = max(self.plan) + 1
        self.plan[seq] = self._op(kind)
        return seq

    def _op(self, kind: str) -> Op:
        number = next(self.numbers)
        match kind:
            case "load":
                stored = dict(self.world.records.list(Checkpoint.namespace))
                path = max(stored, default="tinker://nobody:train:0/weights/none")
                prefix = load(Checkpoint, stored[path]).prefix if stored else "models/none"
                return LoadWeights(path, optimizer=number % 2 == 0, prefix=prefix)
            case "step":
                return optim_step()
            case "save":
                return SaveWeights("weights", f"save-{number:03}")
            case "forward":
                return backward(number, forward_only=True)
            case "poison" | "breaking":
                return backward(number, {"poison": POISON, "breaking": BREAKING}[kind])
        return backward(number)

    def _admit(self, seq: int) -> None:
        if seq in self.refused:
            with pytest.raises(BadRequest):
                self.world.admit(seq, self.plan[seq])
            return
        assert self.world.admit(seq, self.plan[seq]) == (seq not in self.admitted)
        self.admitted.add(seq)

    def _finish(self) -> None:
        """All that was withheld arrives, and one healthy worker is rung until nothing waits."""
        for seq in self.plan:
            self._admit(seq)
        self.world.lapse()
        self.last = self.world.trainer("last")
        for _ in range(RING_LIMIT):
            self._ring(self.last, max(self.plan))
            if self.world.applied() == max(self.plan):
                break
        self.what_was_applied_has_a_result()
        assert self.world.oplog.pending() == []
        for seq, result in self.seen.items():
            assert self.world.result(seq) == result, f"the result of seq {seq} changed"

    def _compare(self) -> None:
        reference = Reference(self.exact)
        for seq, op in self.plan.items():
            if seq in self.refused:
                reference.consumed(self.refused[seq])
            else:
                self._check_failure(op, self.seen[seq])
                reference.ran(seq, op, self.seen[seq])
        self.last.ring(max(self.plan))
        owner = self.last.backend.states[MODEL]
        assert (owner.steps, owner.pending) == (reference.state.steps, reference.state.pending), "effects counted once"
        if self.exact:
            assert owner == reference.state

    def _check_failure(self, op: Op, result: Result) -> None:
        loss = getattr(op, "loss_fn", "")
        assert result.failed or loss not in (POISON, BREAKING)
        if result.failed and json.loads(result.body)["category"] == "server":
            assert loss == BREAKING or self.troubles >= 3, "nothing went wrong, yet an Op was given up"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "noisy"])
def test_each_op_has_its_effect_once_whatever_happens_to_workers(client: redis.Redis, tmp_path: Path, exact: bool):
    hit: Counter[Fault] = Counter()
    done: Counter[str] = Counter()
    space = {"client": client, "folder": tmp_path, "exact": exact, "hit": hit, "done": done}
    run_machine(type("Engine", (EngineMachine,), space), short=25)
    assert hit.total() >= 20, "too little went wrong to prove anything"
    assert done["ran"] >= 20, "too little was done to prove anything"
