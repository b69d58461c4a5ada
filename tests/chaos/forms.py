"""Number of injected faults: a short form for every code change, a long form for the published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos import killer


@dataclass(frozen=True, slots=True)
class Form:
    """Size of a chaos run.

    `dose`: how often each fault happens. `slots` SDK clients run scripts of `rounds` rounds at a time, beside a storm
    of `calls`, each posted `copies` times. `changes` (of owner), `refused` (commits) and `shared` (Ops in a shared
    pass) are the minimum counts that the run must reach. `bound`: see compare.py; 0 is to the bit.
    """

    slots: int
    rounds: int
    dose: Mapping[str, int]
    calls: int
    copies: int
    changes: int
    refused: int
    shared: int = 0
    bound: float = 0.0


SHORT = Form(
    slots=4,
    rounds=5,  # each kind of call of script.py once, and a step after the load
    dose={
        killer.OWNER: 4,
        killer.IDLE: 1,
        killer.ZOMBIE: 1,
        killer.SAMPLER: 1,
        killer.KILL_API: 3,
        killer.KILL_STATE: 3,
        killer.KILL_BROKER: 1,
        killer.FLUSH: 1,
    },
    calls=90,
    copies=4,
    changes=8,
    refused=1,
)
LONG = Form(
    slots=6,
    rounds=8,
    dose={
        killer.OWNER: 60,
        killer.IDLE: 15,
        killer.ZOMBIE: 12,
        killer.SAMPLER: 10,
        killer.KILL_API: 100,
        killer.KILL_STATE: 50,
        killer.KILL_BROKER: 15,
        killer.FLUSH: 10,
    },
    calls=1020,
    copies=10,
    changes=150,
    refused=6,
)
# One trainer of two ranks: each kill takes the whole group down, and the group restarts.
RANKS = Form(slots=2, rounds=4, dose={killer.RANK: 2, killer.KILL_STATE: 1}, calls=0, copies=0, changes=2, refused=0)
# The rounding of a pass depends on the Ops that share it, and Adam's steps carry that on.
MERGED = Form(
    slots=4,
    rounds=4,
    dose={killer.OWNER: 3, killer.ZOMBIE: 1, killer.KILL_API: 1, killer.KILL_STATE: 1, killer.FLUSH: 1},
    calls=30,
    copies=4,
    changes=5,
    refused=0,
    shared=20,
    bound=1e-3,
)
