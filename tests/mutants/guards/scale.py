"""Guards against costs that grow with the size of a call, or with the number of runs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_LARGE = f"{_STORES}/test_large_content.py"
_SESSIONS = f"{_STORES}/test_session_lists.py"
_LIMITS = f"{_STORES}/test_limits.py"
_RUNS = f"{_STORES}/test_run_lists.py"
_LISTS = "tests/unit/app/api/test_lists.py"
_TRIPS = "tests/unit/app/api/test_round_trips.py"
_RETIRED = "tests/unit/workers/maintenance/test_sessions.py"
_ENDED = "test_an_ended_run_takes_its_adapters_along_and_reads_no_record_of_its_sessions_other_samplers"

MUTANTS = (
    # Calls and results of megabytes.
    Mutant(
        "large content: a command carries a piece",
        "app/stores/redis/payloads.py",
        "whole[start : start + PIECE_BYTES]",
        "whole[start:]",
        f"{_LARGE}::test_no_command_of_a_large_call_or_result_carries_more_than_a_piece",
    ),
    Mutant(
        "large content: bytes that went while they were read",
        "app/stores/redis/payloads.py",
        "return whole if size and len(whole) == size else None",
        "return whole",
        f"{_LARGE}::test_a_large_call_moves_to_the_object_store_also_while_it_is_read",
    ),
    Mutant(
        "large content: a full server takes the results of what runs",
        "app/stores/redis/payloads.py",
        "        except redis.OutOfMemoryError:",
        "        except ZeroDivisionError:",
        f"{_LARGE}::test_a_full_server_takes_large_results_of_what_runs",
    ),
    Mutant(
        "large content: a key that a dying process leaves",
        "app/stores/redis/payloads.py",
        "                pipe.expire(key, _STAGED_S)\n",
        "",
        f"{_LARGE}::test_a_process_that_dies_while_it_writes_leaves_a_key_that_expires",
    ),
    Mutant(
        "large content: a call whose first pieces lapsed",
        "app/stores/redis/lua/payloads.lua",
        "redis.call('STRLEN', staged) ~= size end",
        "redis.call('EXISTS', staged) == 0 end",
        f"{_LARGE}::test_a_call_whose_first_pieces_have_lapsed_is_not_admitted",
    ),
    Mutant(
        "large content: a result whose first pieces lapsed",
        "app/stores/redis/lua/results.lua",
        "redis.call('STRLEN', staged) ~= tonumber(size) then",
        "redis.call('EXISTS', staged) == 0 then",
        f"{_LARGE}::test_a_result_whose_first_pieces_have_lapsed_is_delivered_again",
    ),
    Mutant(
        "large content: one charge",
        "app/stores/redis/lua/journal.lua",
        "local check = content.is_absent() and over_limits or take",
        "local check = take",
        f"{_LARGE}::test_a_large_call_is_charged_once",
    ),
    Mutant(
        "large content: a fenced result is not kept",
        "app/stores/redis/lua/journal.lua",
        "  redis.call('DEL', ARGV[11])\n",
        "",
        f"{_LARGE}::test_a_result_that_does_not_count_leaves_nothing_behind",
    ),
    Mutant(
        "large content: a result expires with its future",
        "app/stores/redis/lua/results.lua",
        "  redis.call('EXPIRE', 'tinsmith:result:' .. ARGV[i], ARGV[1], 'LT')\n",
        "",
        f"{_LARGE}::test_a_large_result_expires_with_its_future",
    ),
    # Runs of others, and many runs of one session.
    Mutant(
        "runs: a new one is on its project's list",
        "app/stores/redis/lua/journal.lua",
        "  list_owned('model', model)\n",
        "",
        f"{_RUNS}::test_a_listing_costs_the_same_however_many_runs_there_are",
    ),
    Mutant(
        "runs: one that an earlier version moved",
        "app/services/models.py",
        "if fields and load(Model, fields).owner in within",
        "if fields",
        f"{_LISTS}::test_a_run_that_a_process_of_an_earlier_version_moved_is_not_shown_any_more",
    ),
    Mutant(
        "runs: a session is retired in parts",
        "app/services/teardown.py",
        "islice(self._not_ended(session_id), _RETIRED_AT_ONCE)",
        "self._not_ended(session_id)",
        f"{_RETIRED}::test_a_session_of_many_runs_is_retired_in_parts_that_read_its_samplers_once_each",
    ),
    Mutant(
        "runs and sessions: those below a limit are not looked at",
        "app/stores/redis/lua/limits.lua",
        "  if most and listed <= most then return listed end\n",
        "",
        f"{_LIMITS}::test_a_count_looks_at_no_run_below_the_limit_and_at_no_more_than_500",
    ),
    Mutant(
        "runs and sessions: a count looks at few of many",
        "app/stores/redis/lua/limits.lua",
        "redis.call('SRANDMEMBER', list, LOOKED_AT_ONCE)",
        "redis.call('SMEMBERS', list)",
        f"{_SESSIONS}::test_a_new_session_looks_at_no_other_below_the_limit_and_at_no_more_than_500",
    ),
    Mutant(
        "sessions: a finished one leaves the list of live ones",
        "app/stores/redis/lua/lifecycle.lua",
        "list_session(ARGV[1])\nlist_runs(ARGV[1], 'SREM')",
        "list_runs(ARGV[1], 'SREM')",
        f"{_SESSIONS}::test_a_new_session_looks_at_no_other_below_the_limit_and_at_no_more_than_500",
    ),
    Mutant(
        "runs: those of a finished session leave the lists",
        "app/stores/redis/lua/lifecycle.lua",
        "list_runs(ARGV[1], 'SREM')\n",
        "",
        f"{_LIMITS}::test_a_run_leaves_the_lists_when_it_is_unloaded_or_its_session_finished_until_its_next_call",
    ),
    Mutant(
        "runs: one that is unloaded leaves the lists",
        "app/stores/redis/lua/lifecycle.lua",
        "    list_run(ARGV[1], 'SREM')  -- `admit`",
        "    -- `admit`",
        f"{_LIMITS}::test_a_run_leaves_the_lists_when_it_is_unloaded_or_its_session_finished_until_its_next_call",
    ),
    Mutant(
        "runs: an unloaded one is on the lists until its calls have run",
        "app/stores/redis/lua/lifecycle.lua",
        "  if not redis.call('ZSCORE', 'tinsmith:pending', ARGV[1]) then  -- else",
        "  if true then  -- else",
        f"{_LIMITS}::test_an_unloaded_run_counts_until_its_calls_have_run",
    ),
    Mutant(
        "runs: an unloaded one counts until its calls have run",
        "app/stores/redis/lua/limits.lua",
        "\n                   and not redis.call('ZSCORE', 'tinsmith:pending', model)",
        "",
        f"{_LIMITS}::test_an_unloaded_run_counts_until_its_calls_have_run",
    ),
    Mutant(
        "runs: one with a call is no more unloaded",
        "app/stores/redis/lua/journal.lua",
        "  if head[4] then list_run(model, 'SADD') end\n",
        "",
        f"{_LIMITS}::test_a_run_leaves_the_lists_when_it_is_unloaded_or_its_session_finished_until_its_next_call",
    ),
    Mutant(
        "runs: those of an expired session are taken off in turn",
        "app/stores/redis/lua/sessions.lua",
        "  list_run(id, is_live(id) and 'SADD' or 'SREM')",
        "  list_run(id, 'SADD')",
        f"{_LIMITS}::test_runs_of_a_session_that_expired_are_taken_off_the_lists_in_turn",
    ),
    Mutant(
        "runs: a session comes back in slices",
        "app/stores/redis/lua/lifecycle.lua",
        ", 'LIMIT', 0, LISTED_AT_ONCE",
        "",
        f"{_LIMITS}::test_runs_of_a_large_session_that_comes_back_count_again_in_slices",
    ),
    Mutant(
        "runs: a session moves in slices",
        "app/stores/redis/lua/lifecycle.lua",
        "local left = MOVED_AT_ONCE",
        "local left = 1000",
        f"{_RUNS}::test_a_large_session_moves_in_slices_with_all_that_is_made_meanwhile",
    ),
    Mutant(
        "runs: slices of a move that another one overtook",
        "app/stores/redis/lua/lifecycle.lua",
        "  if redis.call('HGET', key, 'owner') ~= owner then return 0 end\n",
        "",
        f"{_RUNS}::test_a_later_move_wins_over_slices_that_are_left",
    ),
    Mutant(
        "runs: the end of one takes its own adapters along",
        "app/stores/redis/lua/lifecycle.lua",
        "  if saved:sub(1, #prefix) == prefix and",
        "  if saved ~= '' and",
        f"{_RETIRED}::{_ENDED}",
    ),
    Mutant(
        "runs: the end of one takes no checkpoint with a path along",
        "app/stores/redis/lua/lifecycle.lua",
        """ and cjson.decode(head[2] or '""') == '' then""",
        " then",
        f"{_RETIRED}::{_ENDED}",
    ),
    Mutant(
        "runs: the end of one looks at all samplers of its session",
        "app/stores/redis/lua/lifecycle.lua",
        "if #ids == tonumber(ARGV[4]) then found",
        "if false then found",
        f"{_RETIRED}::{_ENDED}",
    ),
    Mutant(
        "runs: their checkpoints are read together, also by a server that has forgotten its scripts",
        "app/stores/redis/client.py",
        "                return [self(name, *argv) for argv in calls]",
        "                raise",
        f"{_TRIPS}::test_runs_are_listed_also_by_a_server_that_has_forgotten_its_scripts",
    ),
    Mutant(
        "runs: the checkpoints of a few at a time",
        "app/stores/redis/client.py",
        "for some in slices(prefixes, _PREFIXES):",
        "for some in (prefixes,):",
        f"{_TRIPS}::test_a_long_list_of_runs_is_read_some_runs_at_a_time",
    ),
    Mutant(
        "checkpoints: those of a run in slices",
        "app/stores/redis/lua/records.lua",
        "argv[1], argv[2], 'LIMIT', 0, argv[3])",
        "argv[1], argv[2])",
        f"{_STORES}/test_checkpoint_lists.py"
        "::test_the_checkpoints_of_long_runs_are_read_in_slices_that_share_a_round_trip",
    ),
    Mutant(
        "checkpoints: the clock is asked for where one expires",
        "app/services/tenants/access.py",
        "if any(one.expires_at is not None for _, one in found):",
        "if False:",
        f"{_TRIPS}::test_the_clock_is_asked_for_once_where_a_checkpoint_expires",
    ),
    # Positions of many waiting calls.
    Mutant(
        "positions: the models of a project are counted once",
        "app/services/queue_positions.py",
        "if (owner, turns) not in self._in_turns:",
        "if True:",
        "tests/unit/app/services/test_queue_positions.py::test_the_models_of_a_project_are_counted_once_for_all_of_its_calls",
    ),
    Mutant(
        "positions: what runs a call is read once for each of 5,000 models",
        "app/services/queue.py",
        "_PARENTS = 10_000",
        "_PARENTS = 4096",
        "tests/unit/app/services/test_queue_states.py::test_5000_polls_for_a_model_each_read_none_of_them_twice",
    ),
)
