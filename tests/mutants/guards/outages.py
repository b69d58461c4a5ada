"""Guards of what goes on while the object store is away or hangs, no trainer runs, or a record cannot be read."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SESSIONS = "workers/maintenance/sessions.py"
_SPILLS = "workers/maintenance/spilling.py"
_ORPHANS = "workers/maintenance/orphans.py"
_ADAPTER_FILES = "workers/sample/adapter_files.py"
_LUA = "app/stores/redis/lua"
_TEARDOWN = "tests/unit/workers/maintenance/test_slow_teardown.py"
_HANGS = f"{_TEARDOWN}::test_while_the_object_store_hangs_a_round_tears_down_one_run_and_the_next_comes_much_later"
_SPILLING = "tests/unit/workers/maintenance/test_spilling.py"
_STUCK = f"{_SPILLING}::test_a_payload_that_cannot_be_moved_keeps_neither_others_nor_results_nor_garbage"
_UNREADABLE = "tests/unit/workers/maintenance/test_unreadable_records.py"
_MISSING = "tests/unit/workers/sample/test_missing_adapters.py"
# Without the fixtures of the API's own tests, which take seconds to load.
_PUT_OFF = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_put_off.py"
_FULL = f"{_PUT_OFF}::test_a_project_whose_samples_are_all_put_off_has_no_more_than_its_share_of_a_full_queue"
_REQUEUED = f"{_PUT_OFF}::test_a_sample_is_requeued_until_it_is_begun_again_or_ends"
_EARLIER = f"{_PUT_OFF}::test_what_a_process_of_an_earlier_version_left_on_the_list_counts_for_an_hour"

MUTANTS = (
    # Teardown of retired sessions.
    Mutant(
        "sessions: samples wait for no teardown",
        _SESSIONS,
        "        aborted = self._lifecycle.abort_samples()\n",
        "        self._retire()\n        aborted = self._lifecycle.abort_samples()\n",
        f"{_TEARDOWN}::test_the_samples_of_a_client_that_is_back_wait_for_no_teardown",
    ),
    Mutant(
        "sessions: one that cannot be torn down",
        _SESSIONS,
        "with isolated(session_id):",
        "if True:",
        f"{_TEARDOWN}::test_a_session_that_cannot_be_torn_down_keeps_no_other",
    ),
    Mutant(
        "sessions: a round of teardown ends within a session",
        "app/services/teardown.py",
        "if place and time.monotonic() >= until:",
        "if False:",
        _HANGS,
    ),
    Mutant(
        "sessions: a round tears down one run at least",
        "app/services/teardown.py",
        "if place and time.monotonic() >= until:",
        "if time.monotonic() >= until:",
        "tests/unit/workers/maintenance/test_slow_teardown.py"
        "::test_a_part_of_a_session_is_torn_down_however_long_it_took_to_find_it",
    ),
    Mutant(
        "sessions: adapters that were deleted before have no files",
        "app/services/teardown.py",
        ' and "given_up" not in fields:',
        ":",
        f"{_TEARDOWN}::test_one_large_session_is_torn_down_in_rounds_that_each_go_on_where_the_last_one_stopped",
    ),
    Mutant(
        "runs: adapters that were deleted before have no files",
        "app/stores/redis/lua/lifecycle.lua",
        "head[3] and '' or saved",
        "saved",
        f"{_TEARDOWN}::test_the_deletion_of_a_run_lists_no_files_of_given_up_adapters",
    ),
    Mutant(
        "sessions: a round of teardown ends between sessions",
        _SESSIONS,
        "if time.monotonic() >= until:",
        "if False:",
        _HANGS,
    ),
    Mutant("sessions: teardown has pauses", _SESSIONS, "if started < self._retiring_due:", "if False:", _HANGS),
    # Spilling.
    Mutant(
        "spilling: an object that cannot be deleted",
        _SPILLS,
        "        try:\n            self._move()\n",
        "        self._payloads.remove_garbage()\n        try:\n            self._move()\n",
        f"{_SPILLING}::test_an_object_that_cannot_be_deleted_keeps_nothing_from_moving",
    ),
    Mutant(
        "spilling: a payload that cannot be moved goes last",
        _SPILLS,
        "sorted(due, key=self._failed.__contains__)",
        "due",
        _STUCK,
    ),
    Mutant(
        "spilling: a payload that cannot be moved keeps no garbage",
        _SPILLS,
        "        finally:\n            self._payloads.remove_garbage()",
        "        except ZeroDivisionError:\n            self._payloads.remove_garbage()",
        _STUCK,
    ),
    # Records that cannot be read.
    Mutant(
        "accounting: a checkpoint that cannot be read",
        "workers/maintenance/accounting.py",
        "except (TypeError, ValueError):",
        "except ZeroDivisionError:",
        "tests/unit/workers/maintenance/test_accounting.py"
        "::test_a_checkpoint_that_cannot_be_read_keeps_no_other_from_counting_and_no_page_here",
    ),
    Mutant(
        "orphans: a checkpoint that cannot be read",
        _ORPHANS,
        '                log.warning("a checkpoint cannot be read and is kept: %s", path)\n',
        "                raise\n",
        f"{_UNREADABLE}::test_a_checkpoint_that_cannot_be_read_stays_and_keeps_no_other",
    ),
    Mutant(
        "orphans: the files of an upload that cannot be read",
        _ORPHANS,
        "                yield upload_id\n            else:\n",
        "                continue\n            else:\n",
        f"{_UNREADABLE}::test_an_upload_that_cannot_be_read_stays_and_keeps_no_other",
    ),
    # Adapters that only a trainer can bring.
    Mutant(
        "adapters: missing files are seldom asked for",
        _ADAPTER_FILES,
        "if now - missing.asked > _ASK_AGAIN_S:",
        "if True:",
        f"{_MISSING}::test_however_many_requests_want_missing_files_their_owner_is_requested_every_half_minute",
    ),
    Mutant(
        "adapters: files that came are missing no more",
        _ADAPTER_FILES,
        "                self._missing.pop(prefix, None)\n                return",
        "                return",
        f"{_MISSING}::test_files_that_came_and_are_lost_again_are_requested_at_once",
    ),
    Mutant(
        "adapters: files that are gone are missing no more",
        _ADAPTER_FILES,
        "                    self._missing.pop(prefix, None)\n                    raise",
        "                    raise",
        f"{_MISSING}::test_nothing_is_remembered_of_missing_files_once_they_are_gone",
    ),
    # Requeued samples.
    Mutant(
        "admit_sample: requeued samples count for their project",
        f"{_LUA}/samples.lua",
        "  unfinished = unfinished + redis.call('ZCOUNT', requeued_key(queue, project), requeued_since(), '+inf')\n",
        "",
        _FULL,
    ),
    Mutant(
        "admit_sample: requeued samples fill no queue for others",
        f"{_LUA}/samples.lua",
        "  count(redis.call('ZRANGEBYSCORE', requeued_projects(queue), requeued_since(), '+inf'))\n",
        "",
        _FULL,
    ),
    Mutant(
        "claim_sample: it is requeued no more",
        f"{_LUA}/samples.lua",
        "count_dispatched(ARGV[1], queue, leave_project(ARGV[1], queue))",
        "count_dispatched(ARGV[1], queue, redis.call('HGET', 'tinsmith:future:' .. ARGV[1], 'owner'))",
        _REQUEUED,
    ),
    Mutant(
        "leave_project: it is requeued no more",
        f"{_LUA}/dispatch.lua",
        "    leave_requeued(request, queue, project)\n",
        "",
        _REQUEUED,
    ),
    Mutant(
        "note_requeued: the list expires",
        f"{_LUA}/dispatch.lua",
        "  redis.call('PEXPIRE', key, REQUEUED_MS)\n",
        "",
        _REQUEUED,
    ),
    Mutant(
        "off: what an earlier version left counts for an hour",
        f"{_LUA}/dispatch.lua",
        "return now_ms() - REQUEUED_MS",
        "return '-inf'",
        _EARLIER,
    ),
    Mutant(
        "garbage: an object that cannot be deleted keeps no other",
        "app/stores/redis/payloads.py",
        "            except Unavailable:\n                self._remove_singly(garbage)",
        "            except ZeroDivisionError:\n                self._remove_singly(garbage)",
        f"{_SPILLING}::test_an_object_that_cannot_be_deleted_keeps_no_other_and_is_named",
    ),
)
