"""Guards of what finds waiting calls again: redispatch, and the trainers' scan for models without an owner."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua/backlog.lua"
_REDISPATCH = "workers/maintenance/redispatch.py"
_FAULTS = "tests/unit/workers/maintenance/test_redispatch_faults.py"
_BOUNDS = "tests/unit/workers/maintenance/test_redispatch_bounds.py"
_SCAN = "tests/unit/workers/train/test_backlog_scan.py"
_UNOWNED = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_unowned.py"

MUTANTS = (
    Mutant(
        "redispatch: an entry that the script cannot read",
        _LUA,
        "pcall(row_of, waiting[i], waiting[i + 1])",
        "true, row_of(waiting[i], waiting[i + 1])",
        f"{_FAULTS}::test_an_entry_that_cannot_be_read_hides_no_other_and_is_logged",
    ),
    Mutant(
        "redispatch: an entry that is no text",
        "app/stores/redis/types.py",
        "except ValueError:",
        "except KeyError:",
        f"{_FAULTS}::test_an_entry_that_cannot_be_read_hides_no_other_and_is_logged",
    ),
    Mutant(
        "redispatch: an owner that is no text",
        "app/stores/redis/journal.py",
        'errors="replace"',
        "",
        f"{_FAULTS}::test_an_owner_whose_name_cannot_be_read_hides_no_other_model",
    ),
    Mutant(
        "redispatch: an error with one model",
        "workers/maintenance/isolation.py",
        "if isinstance(error, redis.RedisError) and is_outage(error):",
        "if True:",
        f"{_FAULTS}::test_an_error_with_one_model_keeps_no_model_and_no_throttled_request_waiting",
    ),
    Mutant(
        "redispatch: an outage is no error with one model",
        "workers/maintenance/isolation.py",
        "if isinstance(error, redis.RedisError) and is_outage(error):",
        "if False:",
        f"{_FAULTS}::test_an_outage_between_two_models_ends_the_round",
    ),
    Mutant(
        "redispatch: an outage keeps what was read",
        _REDISPATCH,
        "            if not waiting:\n",
        "            if True:\n",
        f"{_FAULTS}::test_an_outage_in_a_later_slice_drops_nothing_that_was_read",
    ),
    Mutant(
        "redispatch: after an outage the first row",
        _REDISPATCH,
        "first, self._first = self._first, 0",
        "first = self._first",
        f"{_FAULTS}::test_after_an_outage_a_round_begins_at_the_first_row",
    ),
    Mutant(
        "redispatch: the next rows",
        _REDISPATCH,
        "self._first = end",
        "self._first = 0",
        f"{_BOUNDS}::test_however_many_are_stuck_the_others_have_their_rounds",
    ),
    Mutant(
        "redispatch: fewer wait than the last round read",
        _REDISPATCH,
        "if not 0 < first < count:",
        "if first == 0:",
        f"{_BOUNDS}::test_once_the_others_have_ended_the_first_row_is_read_at_once",
    ),
    Mutant(
        "redispatch: no round for throttled requests only",
        _REDISPATCH,
        " and not any(pending.throttled for pending in waiting)",
        "",
        f"{_BOUNDS}::test_however_many_are_throttled_what_is_before_them_is_read_in_every_round",
    ),
    Mutant(
        "redispatch: throttled requests of every queue",
        _REDISPATCH,
        "for queue in self._oplog.sample_queues():",
        "for queue in {pending.queue for pending in waiting if pending.throttled}:",
        f"{_BOUNDS}::test_however_many_are_throttled_of_one_queue_those_of_another_are_dispatched",
    ),
    Mutant(
        "redispatch: the room for what other rounds read",
        _REDISPATCH,
        "            first = 0\n            self._numbers.clear()\n",
        "            first = 0\n        self._numbers.clear()\n",
        f"{_BOUNDS}::test_a_queue_has_room_for_all_that_wait_for_it_whichever_round_reads_them",
    ),
    Mutant(
        "redispatch: the wait of a model that a round does not read",
        _REDISPATCH,
        "if now - last.at < _REMEMBERED_S}",
        "if id_ in [one.id for one in waiting]}",
        f"{_BOUNDS}::test_a_model_that_some_rounds_do_not_read_is_dispatched_no_more_often",
    ),
    Mutant(
        "redispatch: what has ended",
        _REDISPATCH,
        "if now - last.at < _REMEMBERED_S}",
        "}",
        f"{_BOUNDS}::test_a_call_that_has_ended_is_forgotten",
    ),
    Mutant(
        "redispatch: the queue of the owner",
        _REDISPATCH,
        "replace(pending, queue=queue_for(pending.queue, node))",
        "pending",
        f"{_BOUNDS}::test_the_queue_of_a_trainer_in_a_long_pass_does_not_grow_whoever_forwards_to_it",
    ),
    Mutant(
        "redispatch: a sampling request has no owner",
        _REDISPATCH,
        "yield pending if pending.seq is None else replace",
        "yield replace",
        f"{_BOUNDS}::test_a_sampling_request_that_a_worker_began_is_dispatched_to_all_of_them",
    ),
    Mutant(
        "unowned: the page",
        _LUA,
        "ARGV[3] % pages * most",
        "0",
        f"{_SCAN}::test_a_model_behind_a_thousand_that_are_stuck_is_found",
    ),
    Mutant(
        "unowned: the next page",
        "workers/train/scheduler.py",
        "        self._page += 1\n",
        "",
        f"{_SCAN}::test_a_model_behind_a_thousand_that_are_stuck_is_found",
    ),
    Mutant(
        "unowned: no page of throttled requests",
        _LUA,
        "'(' .. THROTTLED_MS",
        "'+inf'",
        f"{_UNOWNED}::test_throttled_requests_have_no_pages",
    ),
    Mutant(
        "unowned: a model that cannot be read",
        _LUA,
        "pcall(next_of, ids[i])",
        "true, next_of(ids[i])",
        f"{_UNOWNED}::test_a_model_that_cannot_be_read_hides_no_other",
    ),
)
