"""Workers crash, sleep, lose answers and stores; clients send in any order. Each Op still has its effect exactly once.

Several models share the workers: their Ops alternate, share passes where that is on, and run beside background saves.
"""

from __future__ import annotations

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

from app.domain.records import Sampler
from app.stores.redis.types import RefusalKind
from tests.property.client import Client
from tests.property.faults import Fault
from tests.property.runs import run_machine
from tests.property.world import MODEL, Process, TrainerWorld

NODES = ("a", "b")
MODELS = (MODEL, "session:train:1", "session:train:2")
KINDS = st.sampled_from(
    [
        *(
            "backward",
            "backward",
            "backward",
            "step",
            "step",
            "forward",
            "save",
            "save",
            "save for sampling",
            "save for sampling",
        ),
        *("load", "poison", "breaking"),
    ]
)
FAULTS = st.sampled_from([Fault.NONE, Fault.NONE, *Fault])
# An Op makes up to nine calls to the outside, a restore some more; and other models have their turns.
CALLS = st.integers(0, 20)
OFFSETS = st.integers(0, 4)
PICKS = st.integers(0, len(MODELS) - 1)
# Most of the time the models are together on one node.
DISPATCHED_TO = st.sampled_from(["a", "a", "a", "b"])
TROUBLES = st.sampled_from(["restart", "stop", "idle", "lapse", "renew", "zombie", "lag", "catch up", "tick", "wipe"])
REFUSALS = st.sampled_from(get_args(RefusalKind))
RING_LIMIT = 60


class EngineMachine(RuleBasedStateMachine):
    """Random calls of clients and faults of workers.

    `form`: "exact" compares bits, "merged" has shared passes, within a bound, and with "noisy" a batch never gives the
    same gradient twice. `done` counts the faults that really happened over all examples: a run that
    disturbs nothing proves nothing.
    """

    client: redis.Redis
    folder: Path
    form: str
    hit: Counter[Fault]
    done: Counter[str]

    @initialize(seed=st.integers(0, 99), models=st.integers(2, len(MODELS)))
    def start(self, seed: int, models: int) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self.folder))
        noise = random.Random(seed) if self.form == "noisy" else None
        merged_tokens = 0 if self.form == "exact" or (self.form == "noisy" and seed % 2) else 8192
        self.world = TrainerWorld(self.client, self.place, noise, MODELS[:models], merged_tokens, self.hit)
        self.clients = [Client(self.world, model) for model in self.world.models]
        self.trainers = {node: self.world.trainer(node) for node in NODES}
        self.zombies: list[Process] = []
        self.troubles = 0
        # Every example has a shared pass (if that is on), a step beside a save, and a lost transfer.
        self.all_call_and_dispatch(["backward", "save", "step"], "a", Fault.NONE, 0)
        self._lose_a_transfer("a", self.clients[0])

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._finish()
            self._compare()
            self.done += self.world.done
        finally:
            self.world.stop()
            shutil.rmtree(self.place)

    # Actions of clients.

    @rule(
        model=PICKS,
        what=st.sampled_from(["later", "again", "again", "refuse"]),
        kind=KINDS,
        pick=OFFSETS,
        refusal=REFUSALS,
    )
    def a_client_is_odd(self, model: int, what: str, kind: str, pick: int, refusal: RefusalKind) -> None:
        """Calls out of order, repeated calls (`again`), late ones, refused ones and ones given up."""
        client = self._client(model)
        match what:
            case "later":
                client.call(kind)
            case "again":
                client.admit(sorted(client.plan)[-1 - pick % len(client.plan)])
            case "refuse":
                client.refuse(self.world.applied(client.model) + 1 + pick, refusal)

    @rule(model=PICKS, kinds=st.lists(KINDS, min_size=1, max_size=3))
    def call(self, model: int, kinds: list[str]) -> None:
        """Journals calls whose dispatches are lost or late."""
        client = self._client(model)
        for kind in kinds:
            client.admit(client.call(kind))

    # Faults of workers.

    @rule(model=PICKS, kinds=st.lists(KINDS, min_size=1, max_size=3), node=DISPATCHED_TO, fault=FAULTS, at=CALLS)
    def call_and_dispatch(self, model: int, kinds: list[str], node: str, fault: Fault, at: int) -> None:
        self.call(model, kinds)
        self._dispatch_with(node, self._client(model), 0, fault, at)

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=3), node=DISPATCHED_TO, fault=FAULTS, at=CALLS)
    def all_call_and_dispatch(self, kinds: list[str], node: str, fault: Fault, at: int) -> None:
        """All clients call in step; the fault happens at the first dispatch that finds all their calls."""
        for client in self.clients:
            self._dispatch_with(node, client)
        for number in range(len(self.clients)):
            self.call(number, kinds)
        for number, client in enumerate(self.clients):
            self._dispatch_with(node, client, 0, Fault.NONE if number else fault, at)

    @rule(model=PICKS, pick=OFFSETS, node=DISPATCHED_TO, fault=FAULTS, at=CALLS)
    def send(self, model: int, pick: int, node: str, fault: Fault, at: int) -> None:
        self._dispatch_with(node, self._client(model), pick, fault, at)

    @rule(model=PICKS, node=st.sampled_from(NODES), what=TROUBLES, offset=OFFSETS)
    def trouble(self, model: int, node: str, what: str, offset: int) -> None:
        """`restart`: another process takes the node's place, and the old one may go on for a while (`zombie`).

        The zombie's snapshots and saves come late. `stop`: the worker ends in order. `renew`: the work of the keeper's
        own thread. `wipe`: the node's machine loses its memory.
        """
        trainer, client = self.trainers[node], self._client(model)
        match what:
            case "restart":
                self.zombies.append(trainer)
                self._restart(node)
            case "stop":
                trainer.close()
                self._restart(node)
            case "idle":
                trainer.owner.evict(client.model)
            case "lag":
                trainer.background.lags = True
            case "catch up":
                for late in (trainer, *self.zombies):
                    late.background.catch_up()
            case "tick":
                trainer.on_tick()
            case "wipe":
                trainer.wipe()
            case "lapse":
                self.troubles += 1
                self.world.lapse()
            case "renew":
                trainer.parts.keeper._renew()
            case "zombie" if self.zombies:
                self._send(self.zombies[-1], client, self.world.applied(client.model) + offset)

    # Invariants.

    @invariant()
    def what_was_applied_has_a_result(self) -> None:
        for client in self.clients:
            client.what_was_applied_has_a_result()

    @invariant()
    def a_new_owner_finds_all_it_needs(self) -> None:
        for client in self.clients:
            client.a_new_owner_finds_all_it_needs()

    def _client(self, pick: int) -> Client:
        return self.clients[pick % len(self.clients)]

    def _others_go_on(self) -> None:
        """Other workers run while one worker sleeps past its lease."""
        self.troubles += 1
        self.world.lapse()
        successor = self.world.trainer("successor")
        for client in self.clients:
            self._send(successor, client, client.last)
        self.zombies.append(successor)
        self.world.lapse()

    def _lose_a_transfer(self, node: str, client: Client) -> None:
        """A machine stops before the upload, and loses its memory."""
        trainer = self.trainers[node]
        trainer.background.lags = True
        client.admit(client.call("save for sampling"))
        self._send(trainer, client, client.last)
        trainer.wipe()
        self._restart(node)

    def _dispatch_with(self, node: str, client: Client, pick: int = 0, fault: Fault = Fault.NONE, at: int = 0) -> None:
        trainer = self.trainers[node]
        trainer.faults.plan(fault, at, self._others_go_on)
        self._send(trainer, client, sorted(client.admitted)[-1 - pick % len(client.admitted)])
        trainer.faults.plan(Fault.NONE, 0)
        if trainer.faults.dead:
            self._restart(node)

    def _send(self, trainer: Process, client: Client, seq: int) -> None:
        if seq < 0 or not (seq in client.admitted or seq in client.refused):
            return
        before = self.world.applied(client.model)
        result = trainer.send(seq, model=client.model)
        if result is not None and seq in client.admitted:
            assert result == self.world.result(seq, client.model), "the answer of a dispatch is the visible one"
        else:
            self.troubles += 1
        self.done["ran"] += self.world.applied(client.model) > before

    def _restart(self, node: str) -> None:
        self.troubles += 1
        self.trainers[node] = self.world.trainer(node, snapshots=self.troubles % 3 > 0, fragile=self.troubles % 2 > 0)

    def _finish(self) -> None:
        """Sends all withheld calls, and dispatches to one healthy worker until nothing waits."""
        for client in self.clients:
            for seq in client.plan:
                client.admit(seq)
        self.world.lapse()
        self.last = self.world.trainer("last")
        for client in self.clients:
            for _ in range(RING_LIMIT):
                self._send(self.last, client, max(client.plan))
                if self.world.applied(client.model) == max(client.plan):
                    break
                self.world.outlast()
        self.what_was_applied_has_a_result()
        assert self.world.oplog.pending() == []
        for client in self.clients:
            client.check_results()
            client.check_sampler_saves(exact=self.form == "exact")
        self.done["transferred"] += len(list(self.world.records.list(Sampler.namespace)))

    def _compare(self) -> None:
        for client in self.clients:
            for _ in range(RING_LIMIT):
                self.last.send(max(client.plan), model=client.model)
                if client.model in self.last.backend.states:
                    break
                self.world.outlast()  # another owner's lease goes on for now
            found = self.last.backend.states[client.model]
            client.what_was_applied_has_a_result()
            client.each_success_has_one_point()
            client.compare(found, exact=self.form == "exact", bound=self.form == "merged", calm=self.troubles < 3)


@pytest.mark.parametrize("form", ["exact", "merged", "noisy"])
def test_each_op_has_its_effect_once_whatever_happens_to_workers(
    client: redis.Redis, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.checkpoints.snapshots._MOST_PASSES", 1)
    hit: Counter[Fault] = Counter()
    done: Counter[str] = Counter()
    space = {"client": client, "folder": tmp_path, "form": form, "hit": hit, "done": done}
    run_machine(type("Engine", (EngineMachine,), space), short=14)
    assert hit.total() >= 20, "too little went wrong to prove anything"
    assert done["ran"] >= 20, "too little was done to prove anything"
    assert done["transferred"] >= 20, "too little was transferred to prove anything"
    assert done["made again"] >= 10, "too few transfers were lost to prove anything"
    assert done["gradients restored"] >= 5, "too few snapshots had pending gradients to prove anything"
    assert done["ahead"] >= 5, "too few Ops ran ahead of their commits to prove anything"
    assert form != "merged" or done["shared"] >= 10, "too few passes were shared to prove anything"
