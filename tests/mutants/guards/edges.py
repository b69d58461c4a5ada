"""Guards against outages, restarts and journals without bound."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
_SESSIONS = "tests/unit/workers/maintenance/test_sessions.py"
_REDISPATCH = "tests/unit/workers/maintenance/test_redispatch.py"
_BOUNDS = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_journal_bounds.py"
_LARGE = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_large_content.py"
_RESTORES = "tests/unit/workers/train/test_restore_faults.py"
_SNAPSHOTS = "tests/unit/workers/checkpoints/test_snapshot_bounds.py"
_PAUSES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_pauses.py"
_CANCEL = "tests/unit/app/commands/test_cancel.py"
_STOP = "tests/processes/workers/process/test_orderly_stop.py"
_DISPATCH = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/test_dispatch.py"
_S3 = (
    "--confcutdir=tests/unit/app/stores tests/unit/app/stores/objects/test_s3.py"
    "::test_an_answer_that_is_not_the_servers_is_an_outage_and_no_stored_file"
)

MUTANTS = (
    # Time in which no client could be heard.
    Mutant(
        "calls_taken: two looks far apart",
        f"{_LUA}/lifecycle.lua",
        "or passed > UNSEEN_MS ",
        "",
        f"{_REDISPATCH}::test_time_that_nobody_saw_does_not_count_for_a_gap",
    ),
    Mutant(
        "calls_taken: a clock that was set back",
        f"{_LUA}/lifecycle.lua",
        "if passed < 0 or",
        "if",
        f"{_SESSIONS}::test_time_that_nobody_saw_is_no_silence_of_a_client",
    ),
    Mutant(
        "calls_taken: no API process",
        f"{_LUA}/lifecycle.lua",
        " or redis.call('EXISTS', 'tinsmith:taking_calls') == 0",
        "",
        f"{_SESSIONS}::test_time_without_an_api_is_no_silence_of_a_client",
    ),
    Mutant(
        "redispatch: a clock that was set back",
        "workers/maintenance/redispatch.py",
        "abs(pending.waited_s) < patience",
        "pending.waited_s < patience",
        f"{_REDISPATCH}::test_a_clock_that_was_set_back_delays_no_dispatch",
    ),
    Mutant(
        "redispatch: a gap from before the clock was set back",
        "workers/maintenance/redispatch.py",
        "waited_s = abs(pending.waited_s)",
        "waited_s = pending.waited_s",
        f"{_REDISPATCH}::test_a_gap_is_given_up_although_the_servers_clock_was_set_back_since_it_was_found",
    ),
    Mutant(
        "redispatch: a queue that nobody reads",
        "workers/maintenance/redispatch.py",
        "if self._room[pending.queue] <= 0:",
        "if False:",
        f"{_REDISPATCH}::test_a_queue_that_nobody_reads_does_not_grow_whoever_leads",
    ),
    # API processes of an earlier version.
    Mutant(
        "take_calls: an earlier version beside this one",
        f"{_LUA}/lifecycle.lua",
        "if former and former ~= 'pieces' then",
        "if false then",
        f"{_LARGE}::test_beside_an_api_of_an_earlier_version_a_large_result_lies_where_that_one_reads_it",
    ),
    Mutant(
        "large results: an earlier version alone",
        "app/stores/redis/payloads.py",
        "return last in (None, _PIECES) and",
        "return",
        f"{_LARGE}::test_beside_an_api_of_an_earlier_version_a_large_result_lies_where_that_one_reads_it",
    ),
    Mutant(
        "large results: those that an earlier leader left",
        f"{_LUA}/results.lua",
        "    redis.call('SADD', 'tinsmith:results_due', request)\n  end\nend\nreturn found[1]",
        "  end\nend\nreturn found[1]",
        f"{_LARGE}::test_a_result_that_a_leader_of_an_earlier_version_left_is_moved",
    ),
    Mutant(
        "snapshots: a trainer of an earlier version cannot read gradients",
        "workers/checkpoints/snapshots.py",
        "return resident.accumulation == GradAccumulation() or self._all_read_gradients()",
        "return True",
        f"{_SNAPSHOTS}::test_beside_a_trainer_of_an_earlier_version_no_snapshot_holds_gradients",
    ),
    Mutant(
        "sessions: time in which no client could be heard",
        "workers/maintenance/sessions.py",
        "if taken_s >= self._session_s:",
        "if True:",
        f"{_SESSIONS}::test_after_an_outage_a_client_has_time_to_come_back_before_its_run_is_removed",
    ),
    # The samples of silent clients make way.
    Mutant(
        "pauses: time in which no client could be heard",
        "workers/maintenance/sessions.py",
        " if taken_s >= PAUSE_S else 0",
        "",
        f"{_SESSIONS}::test_samples_are_paused_for_silence_in_which_calls_were_taken",
    ),
    Mutant(
        "pauses: nobody begins a paused sample",
        f"{_LUA}/samples.lua",
        "if redis.call('HGET', op, 'ring') == 'paused' then return 0 end\n",
        "",
        f"{_PAUSES}::test_samples_of_a_silent_session_count_nowhere_and_nobody_begins_them",
    ),
    Mutant(
        "pauses: a running sample is stopped",
        f"{_LUA}/leases.lua",
        "    if redis.call('HGET', 'tinsmith:op:' .. ARGV[i], 'ring') == 'paused' then lost[#lost + 1] = ARGV[i] end\n",
        "",
        f"{_PAUSES}::test_a_running_sample_is_reported_lost_and_goes_back_without_an_attempt",
    ),
    Mutant(
        "pauses: a stopped sample stays paused",
        f"{_LUA}/samples.lua",
        "if ring ~= 'paused' and ring",
        "if ring",
        f"{_PAUSES}::test_a_running_sample_is_reported_lost_and_goes_back_without_an_attempt",
    ),
    Mutant(
        "pauses: a throttled sample keeps its place when it is put off",
        f"{_LUA}/samples.lua",
        " and ring ~= 'held' then",
        " then",
        f"{_PAUSES}::test_a_throttled_sample_that_is_put_off_keeps_its_place_and_is_dispatched",
    ),
    Mutant(
        "pauses: a sample that ends is paused no more",
        f"{_LUA}/dispatch.lua",
        "    redis.call('SREM', paused_key(request:match('^(.*):%d+$')), request)\n",
        "",
        f"{_PAUSES}::test_paused_samples_end_once_and_leave_nothing_behind",
    ),
    Mutant(
        "pauses: a poll is a sign of life",
        "app/services/polling.py",
        "                self._note_poll(request_id)\n",
        "                pass\n",
        "tests/unit/app/services/test_polling.py::test_a_poll_that_waits_is_a_sign_of_life_unless_its_caller_only_looks_on",
    ),
    Mutant(
        "pauses: a poll does not bring back an ended session",
        f"{_LUA}/lifecycle.lua",
        "if heard and now - heard > POLL_MS then",
        "if not heard or now - heard > POLL_MS then",
        f"{_PAUSES}::test_a_poll_does_not_bring_back_a_session_that_has_ended",
    ),
    Mutant(
        "admit_sample: paused samples fill no queue for others",
        f"{_LUA}/samples.lua",
        "ipairs({'tinsmith:rung:' .. queue, paused_rows(queue)})",
        "ipairs({'tinsmith:rung:' .. queue})",
        f"{_PAUSES}::test_a_queue_that_is_full_of_paused_samples_admits_others",
    ),
    # An orderly stop is no crash.
    Mutant(
        "orderly stop: the Op that runs is put back",
        "workers/train/owner.py",
        "range(resident.applied + 1, resident.reached + 2)",
        "range(0)",
        f"{_STOP}::test_stops_during_a_long_pass_cost_no_attempt",
        slow=True,
    ),
    Mutant(
        "orderly stop: samples that run are put back",
        "workers/sample/runner.py",
        "for request_id, handle in running.items():",
        "for request_id, handle in ():",
        f"{_STOP}::test_stops_during_a_long_sample_cost_no_attempt",
        slow=True,
    ),
    Mutant(
        "orderly stop: others see that the worker leaves",
        "workers/process/orderly_stop.py",
        "        leave()\n",
        "",
        f"{_STOP}::test_others_see_at_once_that_a_worker_is_asked_to_end",
        slow=True,
    ),
    Mutant(
        "orderly stop: the last heartbeat comes before the end of the record",
        "workers/process/liveness.py",
        "            self._thread.join(_LAST_BEAT_S)\n",
        "            pass\n",
        "tests/unit/workers/process/test_heartbeat.py"
        "::test_a_record_that_is_being_written_when_its_worker_ends_does_not_come_back",
    ),
    Mutant(
        "orderly stop: the signal is seen at all",
        "workers/celery_app.py",
        "    orderly_stop.start(runtime.current().leave, runtime.current().hand_back)\n",
        "",
        f"{_STOP}::test_stops_during_a_long_pass_cost_no_attempt",
        slow=True,
    ),
    # The journal has bounds.
    Mutant(
        "admit: a call far ahead",
        f"{_LUA}/journal.lua",
        "  if is_far(model, applied, seq) then return {'far', ''} end\n",
        "",
        f"{_BOUNDS}::test_a_call_that_leaves_too_many_others_missing_is_a_400_and_stores_nothing",
    ),
    Mutant(
        "refuse: a call far ahead",
        f"{_LUA}/journal.lua",
        "if is_far(model, tonumber(applied), seq) then return 0 end\n",
        "",
        f"{_BOUNDS}::test_a_refused_call_that_leaves_too_many_others_missing_stores_nothing",
    ),
    Mutant(
        "admit: a model whose creation failed",
        f"{_LUA}/journal.lua",
        "  if has_failed(model, seq) then return {'failed', ''} end\n",
        "",
        f"{_BOUNDS}::test_a_model_whose_creation_failed_takes_no_calls_and_its_journal_does_not_grow",
    ),
    Mutant(
        "refuse: a model whose creation failed",
        f"{_LUA}/journal.lua",
        "'ended') == 1 or has_failed(model, seq) then",
        "'ended') == 1 then",
        f"{_BOUNDS}::test_a_model_whose_creation_failed_takes_no_calls_and_its_journal_does_not_grow",
    ),
    Mutant(
        "has_failed: a call that others wait for",
        f"{_LUA}/journal.lua",
        "\n         and redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. seq, '+inf') == 0",
        "",
        f"{_BOUNDS}::test_calls_that_were_sent_before_the_creation_failed_are_answered_one_by_one",
    ),
    Mutant(
        "is_far: calls that wait in a row are not missing",
        f"{_LUA}/journal.lua",
        "between - redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. applied, '(' .. seq)",
        "between",
        f"{_BOUNDS}::test_calls_that_wait_in_a_row_are_not_missing",
    ),
    # A restore that ends workers.
    Mutant(
        "restore: too many workers ended",
        "workers/train/owner.py",
        "if deaths >= MAX_ATTEMPTS:",
        "if False:",
        f"{_RESTORES}::test_after_three_workers_that_a_restore_ended_all_calls_of_the_model_fail_at_once",
    ),
    Mutant(
        "restore: one that its worker survived is no end of a worker",
        "workers/train/owner.py",
        " and not self._backend.healthy()\n",
        "\n",
        f"{_RESTORES}::test_a_restore_that_fails_and_ends_no_worker_stops_no_later_call",
    ),
    Mutant(
        "restore: a call that has ended needs none",
        "workers/train/runner.py",
        "        if dispatch.seq > lease.applied:\n            self._retry_backoff.retry_later",
        "        if True:\n            self._retry_backoff.retry_later",
        f"{_RESTORES}::test_a_call_that_has_ended_asks_for_one_restore_only[breaks]",
    ),
    Mutant(
        "restore: its calls need no attempts of their own",
        "workers/train/runner.py",
        " and not lost.at_once:",
        ":",
        f"{_RESTORES}::test_after_three_workers_that_a_restore_ended_all_calls_of_the_model_fail_at_once",
    ),
    Mutant(
        "restore: the count is forgotten after a success",
        f"{_LUA}/leases.lua",
        "if ARGV[3] == '1' then\n  redis.call('DEL', key)\nelseif",
        "if",
        f"{_RESTORES}::test_after_an_hour_or_a_restore_that_succeeds_the_restores_of_a_model_count_anew",
    ),
    # A model that takes no step does not keep all its calls.
    Mutant(
        "snapshots: one after many calls without a step",
        "workers/checkpoints/snapshots.py",
        " and track.ops < _MOST_OPS and",
        " and",
        f"{_SNAPSHOTS}::test_a_model_that_takes_no_step_keeps_few_of_its_calls",
    ),
    Mutant(
        "snapshots: one after many passes without a step",
        "workers/checkpoints/snapshots.py",
        " and track.passes < _MOST_PASSES:",
        ":",
        f"{_SNAPSHOTS}::test_a_model_that_only_adds_gradients_keeps_few_passes_to_run_again",
    ),
    Mutant(
        "snapshots: they hold the pending gradients",
        "workers/checkpoints/snapshots.py",
        "optimizer=True, gradients=True)",
        "optimizer=True)",
        f"{_SNAPSHOTS}::test_the_next_owner_has_the_pending_gradients_to_the_bit",
    ),
    Mutant(
        "snapshots: they hold the window",
        "workers/checkpoints/snapshots.py",
        "return write if accumulation == GradAccumulation() else Writer(write_both, write.size)",
        "return write",
        f"{_SNAPSHOTS}::test_the_next_owner_knows_which_gradient_is_missing",
    ),
    Mutant(
        "snapshots: an earlier version reads none with gradients",
        "workers/checkpoints/transfer.py",
        "schema_version=WINDOW_VERSION if WINDOW in files else SCHEMA_VERSION",
        "schema_version=SCHEMA_VERSION",
        f"{_SNAPSHOTS}::test_an_earlier_version_does_not_take_such_a_snapshot_for_one_without_gradients",
    ),
    Mutant(
        "trim: in slices",
        f"{_LUA}/journal.lua",
        "'-inf', last, 'LIMIT', 0, TRIMMED_AT_ONCE)",
        "'-inf', last)",
        f"{_BOUNDS}::test_a_long_journal_is_trimmed_in_slices",
    ),
    Mutant(
        "doom: in slices",
        f"{_LUA}/journal.lua",
        "'+inf', 'LIMIT', 0, DOOMED_AT_ONCE)",
        "'+inf')",
        f"{_BOUNDS}::test_the_many_calls_behind_a_lost_gradient_are_doomed_in_slices",
    ),
    Mutant(
        "doom: the next slice",
        f"{_LUA}/journal.lua",
        "if dooms then doom(model, seq, dooms) end\n",
        "",
        f"{_BOUNDS}::test_the_many_calls_behind_a_lost_gradient_are_doomed_in_slices",
    ),
    Mutant(
        "entries: no more than a handful",
        "app/stores/redis/journal.py",
        "if not op.fields or (handful and left < 0):",
        "if not op.fields:",
        f"{_BOUNDS}::test_a_replay_reads_few_bytes_at_once",
    ),
    Mutant(
        "cancel: a question before",
        "app/commands/cancel.py",
        "            if not sure:",
        "            if False:",
        f"{_CANCEL}::test_it_asks_before_and_no_ends_nothing",
    ),
    Mutant(
        "cancel: a session that was used again",
        "app/commands/cancel.py",
        "if id_ in heard or session.status",
        "if session.status",
        f"{_CANCEL}::test_a_session_that_was_used_again_is_ended_again_and_its_samples_alone_count",
    ),
    Mutant(
        "cancel: a copy of a checkpoint is no run",
        "app/commands/cancel.py",
        "if not model.copied_from:",
        "if True:",
        f"{_CANCEL}::test_a_copy_of_a_checkpoint_is_no_run_and_stays",
    ),
    Mutant(
        "end_model: the rest of a long journal is deleted later",
        "workers/maintenance/sessions.py",
        "        self._lifecycle.end_calls()",
        "        pass",
        f"{_SESSIONS}::test_the_rest_of_an_ended_models_journal_is_deleted_though_whoever_ended_it_has_died",
    ),
    Mutant(
        "dispatch: a hanging broker is left alone",
        "app/dispatch.py",
        "if now < self._rests_until:",
        "if False:",
        f"{_DISPATCH}::test_only_the_first_calls_wait_for_a_broker_that_hangs",
    ),
    Mutant(
        "dispatch: one call tries a hanging broker",
        "app/dispatch.py",
        "                self._rests_until = now + _REST_S  # the others go on without this call",
        "                pass",
        f"{_DISPATCH}::test_after_a_rest_one_call_tries_the_hanging_broker_and_the_others_go_on",
    ),
    Mutant(
        "dispatch: the rest ends with a success",
        "app/dispatch.py",
        "self._rests_until, self._reached = 0.0, time.monotonic()",
        "self._reached = time.monotonic()",
        f"{_DISPATCH}::test_dispatches_go_out_again_once_one_has_reached_the_broker",
    ),
    Mutant(
        "dispatch: a broker that refuses at once does not hang",
        "app/dispatch.py",
        "- began > _HANGS_S and",
        "- began > 0 and",
        f"{_DISPATCH}::test_a_broker_that_refused_a_message_at_once_gets_the_next_one",
    ),
    Mutant(
        "dispatch: an old failure after a success",
        "app/dispatch.py",
        " and self._reached < began:",
        ":",
        f"{_DISPATCH}::test_a_dispatch_that_began_before_the_broker_was_back_stops_no_later_one",
    ),
    Mutant(
        "dispatch: the wait for a connection ends",
        "app/dispatch.py",
        "self._free.acquire(timeout=ANSWER_S)",
        "self._free.acquire()",
        f"{_DISPATCH}::test_calls_that_wait_for_a_connection_give_up_while_those_that_have_one_hang",
    ),
    Mutant(
        "S3: an answer that is not XML",
        "app/stores/objects/s3.py",
        "(HTTPError, MinioException, ElementTree.ParseError)",
        "(HTTPError, MinioException)",
        _S3,
    ),
    Mutant(
        "S3: an upload without an id",
        "app/stores/objects/s3.py",
        "if not upload_id:",
        "if upload_id is False:",
        _S3,
    ),
    Mutant(
        "S3: a part without a tag",
        "app/stores/objects/s3.py",
        'if "ETag" not in sent.headers:',
        "if False:",
        _S3,
    ),
    Mutant(
        "S3: parts that were not joined",
        "app/stores/objects/s3.py",
        '.tag.endswith("CompleteMultipartUploadResult")',
        '.tag.endswith("")',
        _S3,
    ),
)
