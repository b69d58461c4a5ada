"""Number of random runs per machine: a short form for CI, and `make property`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

RUNS_VARIABLE = "TINSMITH_PROPERTY_RUNS"
_STEPS = 40


def run_machine(machine: type[RuleBasedStateMachine], short: int) -> None:
    """Runs a machine for `short` examples of 40 steps, or for as many as the environment says.

    In the latter case a failure is shrunk. Runs are never derandomized: each CI run searches different cases. A failure
    prints its steps, and a line that reproduces it. Each failure found becomes a scripted test.
    """
    runs = os.environ.get(RUNS_VARIABLE)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(runs or short),
            stateful_step_count=_STEPS,
            phases=[Phase.generate, *([Phase.shrink] if runs else [])],
            deadline=None,
            derandomize=False,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
