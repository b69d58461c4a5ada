"""Guards of scaling to zero: without them no worker starts, or calls are refused while none runs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_BASES = "app/services/base_models.py"
_OF_BASES = "tests/unit/app/services/test_base_models.py"
_OPERATIONS = "tests/unit/app/api/test_operations.py"
_BACKLOG = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_backlog.py"

MUTANTS = (
    Mutant(
        "scaling: a refused call starts a worker",
        _BASES,
        "            self._records.put_demand(role, name)\n",
        "",
        f"{_OF_BASES}::test_a_worker_that_was_never_up_is_demanded_for_a_while",
    ),
    Mutant(
        "scaling: facts of the last worker",
        _BASES,
        "            found = self._of_last_worker(role, name)\n",
        "",
        f"{_OF_BASES}::test_a_process_that_starts_while_no_worker_runs_has_the_facts_from_the_last_one",
    ),
    Mutant(
        "scaling: demand counts as backlog",
        "app/services/queue.py",
        "number=its.number + ((role, name) in demanded)",
        "number=its.number",
        f"{_OPERATIONS}::test_a_call_that_is_refused_as_no_worker_was_ever_up_makes_the_autoscaler_start_one",
    ),
    Mutant(
        "scaling: all that waits is counted",
        "app/stores/redis/backlog.py",
        "found[-1][1], len(found) < most",
        "found[-1][1], True",
        f"{_BACKLOG}::test_all_that_waits_is_counted_by_queue_with_the_longest_wait",
    ),
)
