"""Guards of tenants and limits."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_LISTS = f"{_STORES}/test_checkpoint_lists.py"
_SESSIONS = f"{_STORES}/test_session_lists.py"
_RESERVATIONS = f"{_STORES}/test_reservations.py"
_BUCKET = "--confcutdir=tests/unit/workers/backends/training tests/security/test_hostile_bucket.py"
_POLLS = "tests/unit/app/services/test_polling.py"

_PROJECTS = "tests/unit/app/console/test_projects.py"
_ADMINISTRATION = "app/services/tenants/administration.py"

MUTANTS = (
    Mutant(
        "accounts: a key revoked while the object store was away",
        "app/services/tenants/accounts.py",
        "max(known or kept, kept,",
        "max(kept, known or kept,",
        "tests/unit/app/services/tenants/test_accounts.py"
        "::test_while_the_object_store_is_away_a_key_can_be_revoked_and_nothing_be_made",
    ),
    # Administration by callers.
    Mutant(
        "administration: of the own projects alone",
        _ADMINISTRATION,
        '            check_role(caller, check_seen(caller, project), "admin")\n',
        "            pass\n",
        f"{_PROJECTS}::test_nobody_else_sees_or_changes_a_project",
    ),
    Mutant(
        "administration: an admin sets no limit that protects others",
        _ADMINISTRATION,
        "if not caller.is_operator and (beyond := sorted((limits",
        "if False and (beyond := sorted((limits",
        f"{_PROJECTS}::test_an_admin_sets_how_long_checkpoints_are_kept_and_no_other_limit",
    ),
    Mutant(
        "administration: a key for one project",
        "app/domain/accounts.py",
        "if not self.only_project or id_ == self.project",
        "if True",
        f"{_PROJECTS}::test_a_key_of_the_page_works_in_this_project_alone_also_after_its_user_joins_another",
    ),
    Mutant(
        "administration: a key can do no more than the one that makes it",
        _ADMINISTRATION,
        "if beyond := sorted(wanted - caller.scopes):",
        "if beyond := []:",
        f"{_PROJECTS}::test_a_key_makes_no_key_that_can_do_more_or_lives_longer",
    ),
    Mutant(
        "administration: an admin creates no user",
        _ADMINISTRATION,
        "if not found and not caller.is_operator:",
        "if False:",
        f"{_PROJECTS}::test_an_admin_adds_users_of_the_organisation_and_creates_none",
    ),
    Mutant(
        "administration: another user's wider key",
        _ADMINISTRATION,
        "if not (caller.is_operator or found.only_project or self._is_own(found, caller)):",
        "if False:",
        f"{_PROJECTS}::test_an_admin_revokes_no_key_that_works_in_other_projects_of_another_user",
    ),
    # Sessions.
    Mutant(
        "sessions: the limit of live ones",
        f"{_LUA}/limits.lua",
        "    local live = live_sessions(payer, most)\n    if live > most then",
        "    if false then",
        f"{_SESSIONS}::test_a_session_over_the_limit_is_refused_until_another_has_ended",
    ),
    Mutant(
        "sessions: one that is opened again is not charged again",
        f"{_LUA}/sessions.lua",
        "if redis.call('EXISTS', 'tinsmith:sessions:' .. ARGV[1]) == 1 then return {} end\n",
        "",
        f"{_SESSIONS}::test_a_session_that_is_opened_again_stays_as_it_is",
    ),
    Mutant(
        "sessions: one that comes back counts again",
        f"{_LUA}/lifecycle.lua",
        "    list_session(id)  -- it may",
        "    -- it may",
        f"{_SESSIONS}::test_a_session_that_comes_back_counts_again",
    ),
    Mutant(
        "sessions: those of an earlier version are found",
        "app/stores/redis/records.py",
        "        if total == listed:\n",
        "        if True:\n",
        f"{_SESSIONS}::test_sessions_stored_before_the_lists_are_found_at_once",
    ),
    Mutant(
        "sessions: a moved one leaves its former project's list",
        f"{_LUA}/sessions.lua",
        "  redis.call('ZREM', lists .. former, id)\n",
        "",
        f"{_SESSIONS}::test_a_moved_session_is_on_the_list_of_its_new_project",
    ),
    # Held polls and streams.
    Mutant(
        "polls: a project within its share is held though others filled the capacity",
        "app/services/polling.py",
        "return is_within_share and",
        "return False and",
        f"{_POLLS}::test_a_project_within_its_share_is_held_in_full_though_another_filled_the_capacity",
    ),
    Mutant(
        "polls: the share of a project",
        "app/services/polling.py",
        "capacity // len(self._open)",
        "capacity",
        f"{_POLLS}::test_a_project_within_its_share_is_held_in_full_though_another_filled_the_capacity",
    ),
    Mutant(
        "polls: a key that was revoked while its poll waited",
        "app/services/polling.py",
        """            if not done:
                self._check_key(caller)
""",
        "",
        f"{_POLLS}::test_a_poll_that_waited_gets_nothing_once_its_key_is_revoked",
    ),
    Mutant(
        "streams: a key that was revoked meanwhile",
        "app/services/openai/streaming.py",
        "            self._check_key(caller)\n",
        "",
        "tests/unit/app/services/openai/test_streaming.py"
        "::test_a_stream_ends_at_the_next_beat_after_its_key_was_revoked",
    ),
    # Tenants and hostile input.
    Mutant(
        "futures: the size of a foreign result",
        "app/stores/redis/futures.py",
        "        fields = self._redis.hmget(",
        "        read_hash(self._redis, keys.future(request_id))\n        fields = self._redis.hmget(",
        "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_results.py"
        "::test_of_a_result_only_its_owner_learns_the_size",
    ),
    Mutant(
        "futures: the reads that a foreign id costs like an unknown one",
        "app/stores/redis/futures.py",
        "            absence = self._absence(request_id, owners)  # also for a foreign id: it costs the same reads\n"
        '            raise NotFound(f"future {request_id!r} does not exist") if state else absence',
        '            raise NotFound(f"future {request_id!r} does not exist") if state '
        "else self._absence(request_id, owners)",
        "tests/security/test_tenants.py::test_what_is_somebody_elses_takes_the_time_of_what_never_was",
    ),
    Mutant(
        "checkpoints of a run: the private ones of others",
        f"{_LUA}/records.lua",
        "if held[2] == 'true' or (held[1] and projects[held[1]]) then",
        "if held[1] then",
        f"{_LISTS}::test_of_a_run_the_public_checkpoints_and_those_of_the_projects_are_found_in_one_call",
    ),
    Mutant(
        "what is somebody else's is not there",
        "app/services/tenants/access.py",
        "or not caller.sees(found.owner)",
        "",
        "tests/security/test_tenants.py::test_what_is_somebody_elses_is_as_if_it_were_not_there",
    ),
    Mutant(
        "a run of somebody else is not there",
        "app/services/tenants/access.py",
        " or not caller.sees(load(Model, stored).owner)",
        "",
        "tests/security/test_tenants.py::test_what_is_somebody_elses_is_as_if_it_were_not_there",
    ),
    Mutant(
        "limits of projects: the seq of a call that is refused for good",
        "app/api/training.py",
        " or isinstance(error, LimitReached)",
        "",
        "tests/unit/app/api/test_limits.py::test_no_call_waits_for_a_save_that_was_over_the_limit",
    ),
    Mutant(
        "limits of projects: a call whose first copy was admitted meanwhile",
        "app/services/admission.py",
        "return self._oplog.digest(request_id) is None",
        "return True",
        "tests/unit/app/api/test_budget.py"
        "::test_a_batch_whose_first_copy_another_process_admits_meanwhile_is_the_same_call",
    ),
    Mutant(
        "limits of projects: what others wait for",
        f"{_LUA}/journal.lua",
        "check(cjson.decode(charge), exempt)",
        "check(cjson.decode(charge))",
        f"{_STORES}/test_rates.py::test_what_others_wait_for_passes_and_is_charged",
    ),
    Mutant(
        "limits of projects: calls that were sent ahead together",
        f"{_LUA}/journal.lua",
        " or seq < tonumber(exempted or 0)",
        "",
        f"{_STORES}/test_rates.py::test_calls_sent_ahead_together_let_a_single_call_pass_over_the_rate",
    ),
    Mutant(
        "limits of projects: a refused batch lets no call before it pass",
        f"{_LUA}/journal.lua",
        "\n         and redis.call('HEXISTS', 'tinsmith:future:' .. request, 'refused') == 0\n",
        "\n",
        f"{_STORES}/test_rates.py::test_no_call_ahead_keeps_those_before_it_from_waiting_for_a_rate",
    ),
    Mutant(
        "limits of projects: the first part of each batch",
        f"{_LUA}/journal.lua",
        "seq < tonumber(exempted or 0)",
        "exempted",
        f"{_STORES}/test_rates.py::test_the_first_part_of_each_batch_passes",
    ),
    Mutant(
        "no room: one call far ahead lets in few bytes",
        f"{_LUA}/journal.lua",
        " and tonumber(let_in or 0) < LET_IN",
        "",
        f"{_STORES}/test_shortage.py::test_one_call_far_ahead_lets_few_bytes_in_while_a_disk_is_nearly_full",
    ),
    Mutant(
        "limits of projects: reserved bytes",
        f"{_LUA}/limits.lua",
        "bytes_stored(payer) + bytes_reserved(payer) +",
        "bytes_stored(payer) +",
        f"{_RESERVATIONS}::test_a_reservation_counts_until_it_is_released_or_lapses",
    ),
    Mutant(
        "reservations: they lapse",
        f"{_LUA}/limits.lua",
        "redis.call('ZRANGEBYSCORE', LAPSES, '-inf', now_ms())",
        "{}",
        f"{_RESERVATIONS}::test_a_reservation_counts_until_it_is_released_or_lapses",
    ),
    Mutant(
        "reservations: no checkpoint without one",
        f"{_LUA}/records.lua",
        "if not reservation or tonumber(reservation.bytes) < tonumber(ARGV[2]) then return -1 end",
        "",
        f"{_RESERVATIONS}::test_a_checkpoint_is_refused_when_its_reservation_is_gone_or_too_small",
    ),
    Mutant(
        "reservations: a checkpoint is its run's",
        f"{_LUA}/records.lua",
        "if owner then redis.call('HSET', key, 'owner', owner) end",
        "",
        f"{_RESERVATIONS}::test_a_checkpoint_is_its_runs_though_the_session_moves_before_it_is_recorded",
    ),
    Mutant(
        "reservations: a refused one changes nothing",
        f"{_LUA}/limits.lua",
        "if earlier then set_reservation(ARGV[1], earlier) end",
        "",
        f"{_RESERVATIONS}::test_another_reservation_for_a_path_replaces_the_first_unless_it_is_refused",
    ),
    Mutant(
        "limits of projects: samples that ended",
        f"{_LUA}/samples.lua",
        "count_samples(request, -1)",
        "",
        f"{_STORES}/test_limits.py::test_sequences_count_until_their_request_ends_however_it_ends",
    ),
    Mutant(
        "limits of projects: what a sample that is called off took is said by who runs it",
        f"{_LUA}/samples.lua",
        "  if charged.runner == worker then",
        "  if charged.runner then",
        f"{_STORES}/test_limits.py"
        "::test_a_sample_that_is_called_off_while_it_runs_is_given_back_what_it_did_not_take_once",
    ),
    Mutant(
        "limits of projects: a run that ended",
        f"{_LUA}/lifecycle.lua",
        "  list_run(model, 'SREM')\n",
        "",
        f"{_STORES}/test_limits.py::test_a_run_that_ended_is_listed_no_more",
    ),
    Mutant(
        "a checkpoint's files are of kinds that run nothing",
        "workers/checkpoints/transfer.py",
        "if not _FILE.fullmatch(name)",
        "if False",
        f"{_BUCKET}::test_a_manifest_that_names_another_kind_of_file_or_place_is_refused",
    ),
    Mutant(
        "usage: an Op that failed",
        f"{_LUA}/journal.lua",
        "if ARGV[4] == 'done' then count_usage(key, model, ARGV[10]) end",
        "count_usage(key, model, ARGV[10])",
        f"{_STORES}/test_pages.py::test_what_failed_counts_nothing",
    ),
    Mutant(
        "usage and audit log: a page that is closed",
        f"{_LUA}/pages.lua",
        "hour = math.max(hour, pages_closed() + 1)",
        "",
        f"{_STORES}/test_pages.py::test_nothing_is_written_on_a_closed_page_even_if_the_clock_is_set_back",
    ),
    # Lists of checkpoints.
    Mutant(
        "lists: a checkpoint is added to its project's",
        f"{_LUA}/limits.lua",
        "  redis.call(sign > 0 and 'SADD' or 'SREM', checkpoints_of(project), path)\n",
        "",
        f"{_LISTS}::test_a_listing_reads_nothing_of_other_projects",
    ),
    Mutant(
        "lists: what an earlier version saved",
        "app/stores/redis/records.py",
        " != int(held or 0):",
        " < 0:",
        f"{_LISTS}::test_the_first_listing_of_an_earlier_versions_data_makes_the_lists",
    ),
    Mutant(
        "lists: no sums are no proof",
        "app/stores/redis/records.py",
        "return found if since is not None else None",
        "return found",
        f"{_LISTS}::test_the_first_listing_of_an_earlier_versions_data_makes_the_lists",
    ),
    Mutant(
        "lists: what an earlier version moved or deleted",
        "app/stores/redis/records.py",
        """if any(json.loads(fields.get("owner", "null")) != project for""",
        """if any(False for""",
        f"{_LISTS}::test_a_save_of_an_earlier_version_in_place_of_one_of_the_same_size_is_listed",
    ),
    Mutant(
        "lists: a correction takes out what is not the project's",
        f"{_LUA}/records.lua",
        "is_its and 'SADD' or 'SREM'",
        "'SADD'",
        f"{_LISTS}::test_a_save_of_an_earlier_version_in_place_of_one_of_the_same_size_is_listed",
    ),
    Mutant(
        "lists: a deletion in between",
        "app/stores/redis/records.py",
        "_TRIES = 3",
        "_TRIES = 1",
        f"{_LISTS}::test_a_deletion_in_between_is_no_reason_to_read_those_of_others",
    ),
    Mutant(
        "lists: a server that takes no writes",
        "app/stores/redis/records.py",
        "if not is_outage(error):",
        "if True:",
        f"{_LISTS}::test_a_wrong_list_is_no_hindrance_while_the_server_takes_no_writes",
    ),
    Mutant(
        "searches: a named project is one that the caller sees",
        "app/services/views.py",
        "within &= {check_seen(caller, project) for project in only}",
        "within = set(only)",
        "tests/unit/app/api/test_checkpoint_search.py::test_checkpoints_of_others_are_not_found_public_or_not",
    ),
    # Other users of the machine.
    Mutant(
        "data folder: files of the processes",
        "app/stack/up.py",
        "os.umask(0o077)",
        "os.umask(0o022)",
        "tests/processes/app/stack/test_up.py::test_no_other_user_reads_any_file_of_a_running_stack",
    ),
    Mutant(
        "data folder: one that an earlier version made",
        "app/stack/data_folder.py",
        "folder.chmod(_mode(folder) & ~_OTHERS)",
        "pass",
        "tests/processes/app/stack/test_data_folder.py"
        "::test_no_other_user_reads_the_folder_and_an_earlier_versions_is_made_private",
    ),
    # Published checkpoints.
    Mutant(
        "public: a run's owner and metadata",
        "app/services/models.py",
        "            return _published_view(model_id, public)\n",
        "",
        "tests/unit/app/api/test_public.py::test_of_a_runs_owner_and_metadata_nothing_is_published_with_a_checkpoint",
    ),
    Mutant(
        "public: a run's metadata on a copy",
        "app/services/checkpoints.py",
        " if caller.sees(source.owner) else None",
        "",
        "tests/unit/app/api/test_copies.py"
        "::test_a_public_checkpoint_is_copied_by_a_stranger_and_a_private_one_looks_missing",
    ),
    # Small bodies, and secrets as options.
    Mutant(
        "limits: values of a body without a batch",
        "app/api/base.py",
        "min(limits.json_values, _SMALL_VALUES)",
        "limits.json_values",
        "tests/unit/app/api/test_base.py::test_a_small_body_has_few_values_however_many_a_batch_may_have",
    ),
    Mutant(
        "limits: messages of a chat",
        "app/api/schemas.py",
        "if len(value) > self._most:",
        "if False:",
        "tests/unit/app/api/chat/openai/test_refusals.py",
    ),
    Mutant(
        "options: secrets in the list of processes",
        "app/cli.py",
        "        hide_secrets(arguments)\n",
        "",
        "tests/processes/app/stack/test_up.py::test_secrets_given_as_options_are_not_in_the_list_of_processes",
    ),
    Mutant(
        "limits: tokens that one call samples",
        "app/services/sampling.py",
        "if tokens > limits.sampled_tokens:",
        "if False:",
        "tests/unit/app/api/test_base.py::test_one_call_samples_no_more_than_the_settings_allow",
    ),
    Mutant(
        "archives: a stranger's URL ends with the publication",
        "app/services/checkpoints.py",
        "route = _route(checkpoint.prefix) if caller.sees(checkpoint.owner) else _public_route(path)",
        "route = _route(checkpoint.prefix)",
        "tests/unit/app/api/test_archives.py::test_a_strangers_url_works_as_long_as_the_checkpoint_is_published",
    ),
)
