"""Guards of the turns that a trainer and a sampler take on a GPU."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TURNS = "workers/process/gpu_turns.py"
_LOADS = "workers/process/gpu_start_locks.py"
_OF_LOADS = "tests/unit/workers/process/test_gpu_start_locks.py"
_OF_TURNS = "tests/unit/workers/process/test_gpu_turns.py"
_IN_TURNS = "tests/unit/workers/process/test_sampler_in_turns.py"
_SHARED = "tests/unit/workers/test_shared_gpus.py"
_PLACEMENT = "--confcutdir=tests/unit/app/stack tests/unit/app/stack/test_placement.py"

MUTANTS = (
    Mutant(
        "turns: one at a time",
        _TURNS,
        "                fcntl.flock(self._turn, fcntl.LOCK_EX)\n",
        "",
        f"{_OF_TURNS}::test_two_that_are_always_busy_alternate_and_never_overlap",
        slow=True,
    ),
    Mutant(
        "turns: what has begun ends first",
        _TURNS,
        "            self._asked.wait_for(lambda: not self._users)\n",
        "",
        f"{_OF_TURNS}::test_a_busy_holder_ends_what_it_has_begun_and_begins_nothing_new",
    ),
    Mutant(
        "turns: an idle holder keeps its turn while nobody asks",
        _TURNS,
        "self._is_over(began) and self._is_wanted()",
        "self._is_over(began)",
        f"{_OF_TURNS}::test_a_turn_goes_on_while_nobody_else_asks",
    ),
    Mutant(
        "turns: an Op begins after the wait",
        "workers/train/runner.py",
        "with self._gpu_turn():  # before",
        "if True:  # before",
        f"{_SHARED}::test_a_training_call_does_not_begin_before_its_turn",
    ),
    Mutant(
        "turns: a restore begins after the wait",
        "workers/train/owner.py",
        "with self._gpu_turn():",
        "if True:",
        f"{_SHARED}::test_a_restore_does_not_begin_before_its_turn",
    ),
    Mutant(
        "turns: no switch for an Op that is missing",
        "workers/train/runner.py",
        "        self._check_arrived(resident, dispatch)\n",
        "",
        f"{_SHARED}::test_a_call_behind_one_that_is_missing_waits_for_no_turn",
    ),
    Mutant(
        "turns: no switch for a request that was cancelled",
        _TURNS,
        "return self._waiting > 0 and not self._ended",
        "return True",
        f"{_OF_TURNS}::test_a_turn_that_nobody_waits_for_any_more_does_not_begin",
    ),
    Mutant(
        "turns: a trainer that failed keeps its turn",
        _TURNS,
        "if not self._backend.healthy():",
        "if False:",
        f"{_SHARED}::test_a_trainer_that_failed_and_may_have_freed_nothing_keeps_its_turn",
    ),
    Mutant(
        "turns: a wait is no device time",
        "workers/sample/runner.py",
        "self._gpu_turn(handle), ",
        "",
        f"{_SHARED}::test_a_sample_that_waits_for_its_turn_has_no_usage_yet",
    ),
    Mutant(
        "turns: a sleeping engine evicts nothing",
        _TURNS,
        "self._unwanted.append(adapter_id)",
        "self._backend.evict(adapter_id)",
        f"{_IN_TURNS}::test_an_adapter_is_evicted_and_loaded_only_by_an_engine_that_is_awake",
    ),
    Mutant(
        "turns: a sleeping engine is not probed",
        "workers/sample/probe.py",
        "is_due and self._has_gpu_turn() and",
        "is_due and",
        "tests/unit/workers/sample/test_probe.py::test_a_sampler_that_sleeps_is_not_woken_and_is_probed_at_its_next_turn",
    ),
    Mutant(
        "turns: the sampler's GPUs are among the trainer's",
        "app/stack/placement.py",
        "not set(ours) <= set(theirs) or ",
        "",
        f"{_PLACEMENT}::test_a_sampler_that_sleeps_on_other_gpus_than_its_trainer_is_refused",
    ),
    Mutant(
        "gpu loads: a sampler starts alone on its GPUs",
        _LOADS,
        "fcntl.LOCK_EX if alone else fcntl.LOCK_SH",
        "fcntl.LOCK_SH",
        f"{_OF_LOADS}::test_workers_on_a_gpu_with_a_sampler_start_one_after_another",
    ),
    Mutant(
        "gpu loads: a worker that waits for a GPU holds no other one",
        _LOADS,
        "_unlock(each)",
        "pass",
        f"{_OF_LOADS}::test_a_sampler_that_waits_for_one_gpu_says_so_and_keeps_nobody_from_another",
        slow=True,
    ),
)
