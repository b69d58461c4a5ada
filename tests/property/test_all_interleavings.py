"""Every interleaving of two workers and their clients keeps the promises of the journal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import redis

from app.settings import EngineSettings
from app.stores.redis import scripts
from tests.mutants.guards import storing
from tests.mutants.guards.journal import MUTANTS
from tests.mutants.mutant import Mutant
from tests.property.explored_state import BACKWARD, FAILING, REFUSED, STEP, Call
from tests.property.explorer import Broken, Explorer
from tests.property.runs import RUNS_VARIABLE

ONE, TWO = "session:train:0", "session:train:1"
STEPPED = Call(ONE, 0, BACKWARD), Call(ONE, 1, STEP)
LOST = Call(ONE, 0, FAILING), Call(ONE, 1, STEP)
REFUSAL = Call(ONE, 0, REFUSED), Call(ONE, 1, STEP)
BOTH = Call(ONE, 0, BACKWARD), Call(TWO, 0, BACKWARD)
BEHIND = Call(ONE, 0, FAILING), Call(ONE, 1, STEP), Call(ONE, 2, BACKWARD)
TWICE = Call(ONE, 0, FAILING), Call(ONE, 1, FAILING), Call(ONE, 2, STEP)
# The calls in which a missing guard is found without a fault. LOST and a lease that lapses find the others.
FAULTLESS = {
    "refused: a seq that was refused or given up": REFUSAL,
    "doom: up to the next optim_step only": BEHIND,
    "doom: the first reason stays": TWICE,
}
GUARDS = {mutant.name: mutant for mutant in MUTANTS if Path(mutant.file).suffix == ".lua"}
SNAPSHOT = next(mutant for mutant in storing.MUTANTS if mutant.name == "set_snapshot: only the newest epoch")


CASES = [
    pytest.param(STEPPED, {"lapses": 1}, id="a lease lapses"),
    pytest.param(STEPPED, {"deaths": 1}, id="a process dies"),
    pytest.param(STEPPED, {"forgets": True}, id="results expire"),
    pytest.param(BEHIND, {}, id="a gradient is lost"),
    pytest.param(REFUSAL, {}, id="a call is refused"),
    pytest.param(BOTH, {}, id="two models"),
]
# Of `make property` alone: they have many times the states. All of them end; docs/decisions/0004 has the figures, and
# the cases that are left out.
LONG = [
    pytest.param(LOST, {"lapses": 1, "deaths": 1}, id="a lease lapses and a process dies"),
    pytest.param((*STEPPED, Call(TWO, 0, BACKWARD)), {}, id="two models, three calls"),
    pytest.param(BOTH, {"lapses": 1}, id="two models, a lease lapses"),
    pytest.param(BOTH, {"deaths": 1}, id="two models, a process dies"),
]


@pytest.mark.parametrize("calls, faults", CASES + LONG * (RUNS_VARIABLE in os.environ))
def test_no_interleaving_breaks_a_promise(client: redis.Redis, calls: tuple[Call, ...], faults: dict[str, int]):
    assert Explorer(client, calls, **faults).visit() > 300


def test_a_missing_guard_of_snapshots_is_found(client: redis.Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scripts, "packaged", lambda settings: _without(SNAPSHOT, settings))
    with pytest.raises(Broken, match="lacks 0 of"):
        Explorer(client, STEPPED, lapses=1).visit()


@pytest.mark.parametrize("name", GUARDS)
def test_a_missing_guard_is_found(client: redis.Redis, monkeypatch: pytest.MonkeyPatch, name: str):
    guard = GUARDS[name]
    monkeypatch.setattr(scripts, "packaged", lambda settings: _without(guard, settings))
    faultless = FAULTLESS.get(name)
    explorer = Explorer(client, faultless) if faultless else Explorer(client, LOST, lapses=1, forgets=True)
    with pytest.raises(Broken):
        explorer.visit()


def _without(guard: Mutant, settings: EngineSettings, packaged=scripts.packaged) -> Mapping[str, str]:
    return {name: text.replace(guard.old, guard.new) for name, text in packaged(settings).items()}
