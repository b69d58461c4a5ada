"""The list. `old` stands in `file` exactly once; without it (`new` in its place) one of `tests` fails.

To add a guard's: write the smallest change that takes it out, and name the fastest test that misses it.
"""

from __future__ import annotations

from dataclasses import dataclass

_LUA = "app/stores/redis/lua"
# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_OPLOG, _RESULTS = f"{_STORES}/test_oplog.py", f"{_STORES}/test_results.py"
_SAMPLES = f"{_STORES}/test_samples.py"
_HOMES = f"{_STORES}/test_homes.py"
_CANCELLING = "tests/unit/workers/test_cancelling.py"
_JOURNAL = "tests/property/test_journal.py"
_RECOVERY = "tests/property/test_recovery.py"
_CHECKPOINTS = "tests/property/test_checkpoints.py"
_FORMULAS = "workers/training/losses"
_LOSSES = "--confcutdir=tests/unit/workers/training tests/unit/workers/training/losses/test_losses.py"
_SAVES = "tests/unit/workers/test_saves.py"
_HANDOVER = "tests/unit/workers/handover/test_handover.py"
_PADDING = "--confcutdir=tests/unit/workers/training tests/unit/workers/training/test_jobs.py"
_OPENAI = "--confcutdir=tests/unit/app/services/openai tests/unit/app/services/openai"
_LIMITS = "--confcutdir=tests/unit/app/stores tests/unit/app/test_limits.py"
_BUCKET = "--confcutdir=tests/unit/workers/training tests/security/test_hostile_bucket.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`name` is the guard that is gone, `tests` what pytest is told to run.

    A `slow` one's test waits a minute in vain before it fails: `make mutants` alone runs it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    slow: bool = False


MUTANTS = (
    # Admission: a call is identified by model, seq and content.
    Mutant(
        "dedupe: other content under a used seq",
        f"{_LUA}/admit.lua",
        "known[1] == ARGV[6] and 'repeat' or 'conflict'",
        "'repeat'",
        f"{_OPLOG}::test_other_content_under_a_used_seq_is_a_400_and_changes_nothing",
    ),
    Mutant(
        "consumed: a seq whose future has expired",
        f"{_LUA}/admit.lua",
        "if seq <= applied then return {'consumed', ''} end",
        "",
        f"{_OPLOG}::test_a_seq_whose_future_has_expired_is_not_run_again",
    ),
    Mutant(
        "refused: a seq that was refused or given up",
        f"{_LUA}/admit.lua",
        "if known[2] then return {'refused', known[2]} end",
        "",
        f"{_OPLOG}::test_a_lost_batch_is_consumed_and_dooms_only_what_waited_up_to_the_next_optim_step",
    ),
    Mutant(
        "refuse: a seq that is taken",
        f"{_LUA}/refuse.lua",
        "if redis.call('EXISTS', 'tinsmith:op:' .. request) == 1 then return 0 end",
        "",
        f"{_JOURNAL}::test_a_seq_that_is_taken_can_not_be_refused",
    ),
    # Order and ownership.
    Mutant(
        "commit: only applied + 1",
        f"{_LUA}/commit.lua",
        " or tonumber(head[2]) ~= seq - 1",
        "",
        f"{_OPLOG}::test_a_commit_out_of_order_or_twice_is_fenced",
    ),
    Mutant(
        "commit: only the newest epoch",
        f"{_LUA}/commit.lua",
        "head[1] ~= ARGV[2] or ",
        "",
        f"{_OPLOG}::test_a_restarted_node_replaces_its_earlier_process_and_fences_it",
    ),
    Mutant(
        "next: only the newest epoch",
        f"{_LUA}/next.lua",
        "if redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] then return 0 end",
        "",
        f"{_OPLOG}::test_a_restarted_node_replaces_its_earlier_process_and_fences_it",
    ),
    Mutant(
        "acquire: one node at a time",
        f"{_LUA}/acquire.lua",
        "if held and node(held) ~= node(ARGV[2]) then return {held} end",
        "",
        f"{_OPLOG}::test_one_node_owns_a_model_until_its_lease_ends",
    ),
    Mutant(
        "acquire: a new owner has a new epoch",
        f"{_LUA}/acquire.lua",
        "redis.call('HINCRBY', key, 'epoch', 1)",
        "",
        f"{_OPLOG}::test_a_restarted_node_replaces_its_earlier_process_and_fences_it",
    ),
    Mutant(
        "release: only one's own lease",
        f"{_LUA}/release.lua",
        "if redis.call('GET', key) == ARGV[2] then redis.call('DEL', key) end",
        "redis.call('DEL', key)",
        f"{_OPLOG}::test_one_node_owns_a_model_until_its_lease_ends",
    ),
    Mutant(
        "leases: unheard for a lease, all are lost",
        "workers/leases.py",
        "time.monotonic() - self._renewed.get(id_, -math.inf) < self._lease_s",
        "id_ in self._renewed",
        "tests/property/test_leases.py",
    ),
    # Snapshots and the journal behind them.
    Mutant(
        "set_snapshot: only the newest epoch",
        f"{_LUA}/set_snapshot.lua",
        "head[1] ~= ARGV[2] or ",
        "",
        f"{_OPLOG}::test_a_replaced_owner_sets_no_snapshot",
    ),
    Mutant(
        "set_snapshot: never back",
        f"{_LUA}/set_snapshot.lua",
        "tonumber(ARGV[3]) <= tonumber(head[2]) or ",
        "",
        f"{_OPLOG}::test_a_snapshot_trims_the_journal_behind_it_and_only_moves_forward",
    ),
    Mutant(
        "set_snapshot: never ahead of what was applied",
        f"{_LUA}/set_snapshot.lua",
        " or tonumber(ARGV[3]) > tonumber(head[4])",
        "",
        f"{_OPLOG}::test_a_snapshot_trims_the_journal_behind_it_and_only_moves_forward",
    ),
    Mutant(
        "set_snapshot: trim only behind it",
        f"{_LUA}/set_snapshot.lua",
        "redis.call('ZREMRANGEBYSCORE', journal, '-inf', ARGV[3])",
        "redis.call('DEL', journal)",
        f"{_JOURNAL}::test_what_is_behind_a_snapshot_is_trimmed_and_the_rest_stays",
    ),
    Mutant(
        "commit: keep what a replay runs",
        f"{_LUA}/commit.lua",
        "if ARGV[4] == 'failed' or kind == 'forward' or kind == 'save_weights' then",
        "if true then",
        f"{_JOURNAL}::test_what_a_replay_runs_is_kept_until_then",
    ),
    Mutant(
        "replay: what failed has no effect",
        "workers/executor.py",
        "        elif entry.doomed:\n            self.give_up(lease, entry)\n",
        "",
        f"{_RECOVERY}::test_what_failed_has_no_effect_in_a_replay_either",
    ),
    # Lost gradients.
    Mutant(
        "doom: up to the next optim_step only",
        f"{_LUA}/prelude.lua",
        "if redis.call('HGET', op, 'kind') == 'optim_step' then break end",
        "",
        f"{_OPLOG}::test_a_failed_forward_backward_dooms_what_waits_up_to_the_next_optim_step",
    ),
    Mutant(
        "doom: the first reason stays",
        f"{_LUA}/prelude.lua",
        "redis.call('HSETNX', op, 'doomed', reason)",
        "redis.call('HSET', op, 'doomed', reason)",
        f"{_JOURNAL}::test_the_first_reason_an_op_fails_for_stays",
    ),
    Mutant(
        "commit: a failed forward_backward dooms what waits",
        f"{_LUA}/commit.lua",
        "if kind == 'forward_backward' then doom(model, seq, ARGV[9]) end",
        "",
        f"{_OPLOG}::test_a_failed_forward_backward_dooms_what_waits_up_to_the_next_optim_step",
    ),
    Mutant(
        "window: no step without all its gradients",
        "workers/executor.py",
        "if entry.kind == OptimStep.kind and window.missing:",
        "if False:",
        f"{_RECOVERY}::test_no_step_runs_behind_a_batch_that_failed_even_when_another_came",
    ),
    Mutant(
        "window: nothing stands in for a batch that failed",
        "workers/window.py",
        "replace(self, added=True) if self.beyond_repair else Window(added=True)",
        "Window(added=True)",
        f"{_RECOVERY}::test_no_step_runs_behind_a_batch_that_failed_even_when_another_came",
    ),
    Mutant(
        "window: nothing stands in for a refused batch behind others",
        "workers/window.py",
        "beyond_repair=self.beyond_repair or self.added",
        "beyond_repair=self.beyond_repair",
        f"{_RECOVERY}::test_a_refused_batch_may_be_sent_again_only_if_nothing_was_added_before_it",
    ),
    # States that may not be used again.
    Mutant(
        "runner: a state whose commit is in doubt goes",
        "workers/runner.py",
        "        except Fenced as fenced:\n            self._owner.discard(model_id)\n",
        "        except Fenced as fenced:\n",
        f"{_RECOVERY}::test_a_state_whose_commit_is_in_doubt_is_never_used_again",
    ),
    Mutant(
        "runner: all states go when the backend broke",
        "workers/runner.py",
        "        self._owner.discard_all()\n",
        "",
        f"{_RECOVERY}::test_a_state_beside_a_device_error_is_thrown_away",
    ),
    Mutant(
        "owner: an Op has so many attempts",
        "workers/owner.py",
        "        if entry is not None and entry.attempts >= MAX_ATTEMPTS:",
        "        if False:",
        f"{_RECOVERY}::test_an_op_that_always_breaks_its_worker_is_given_up",
    ),
    Mutant(
        "next: an Op that killed its worker had an attempt",
        f"{_LUA}/next.lua",
        "if runner and runner ~= ARGV[4] then redis.call('HINCRBY', op, 'attempts', 1) end",
        "",
        f"{_RECOVERY}::test_an_op_that_always_kills_its_worker_is_given_up",
    ),
    # Saves beside the next Ops.
    Mutant(
        "saves: commits wait behind the save",
        "workers/owner.py",
        "return bool(self.uncommitted) and self.uncommitted[0].attempt.done()",
        "return any(ran.attempt.done() for ran in self.uncommitted)",
        f"{_SAVES}::test_the_next_ops_run_while_a_save_is_written_and_are_committed_behind_it",
        slow=True,
    ),
    Mutant(
        "saves: nothing runs ahead behind a failure",
        "workers/ahead.py",
        "            and not resident.uncommitted[-1].failure\n",
        "",
        f"{_SAVES}::test_what_fails_ahead_dooms_what_waits_as_it_would_have",
    ),
    Mutant(
        "saves: what broke a worker never runs ahead",
        "workers/ahead.py",
        "            head.fresh\n            and ",
        "            ",
        f"{_SAVES}::test_what_broke_a_worker_never_runs_ahead",
    ),
    Mutant(
        "saves: no snapshot of a state that ran ahead",
        "workers/snapshots/schedule.py",
        "            and not resident.uncommitted\n",
        "",
        f"{_SAVES}::test_no_snapshot_is_taken_of_a_state_that_ran_ahead_of_its_commits",
    ),
    Mutant(
        "saves: a state ahead of a save that was put off goes",
        "workers/committer.py",
        "if len(resident.uncommitted) > 1:",
        "if False:",
        f"{_SAVES}::test_a_store_that_is_away_costs_what_ran_ahead_no_attempt_and_no_bit",
    ),
    Mutant(
        "saves: what had begun is left at no attempt",
        "workers/owner.py",
        "self._oplog.put_off(resident.lease, ran.entry.seq)",
        "pass",
        f"{_SAVES}::test_a_model_that_is_let_go_leaves_nothing_undone_and_no_attempt",
    ),
    # Checkpoints.
    Mutant(
        "checkpoints: the manifest comes last",
        "workers/checkpoints.py",
        "    for name, entry in manifest.files.items():\n        _upload(",
        "    store.put_new(f'{prefix}/{MANIFEST}', manifest.to_json())\n"
        "    for name, entry in manifest.files.items():\n        _upload(",
        f"{_CHECKPOINTS}::test_a_write_that_ends_at_any_call_leaves_no_checkpoint_or_a_whole_one_and_can_be_repeated",
    ),
    Mutant(
        "checkpoints: a committed one is not written again",
        "workers/checkpoints.py",
        "    try:\n        return read_manifest(store, prefix)\n    except NotFound:\n        pass\n",
        "",
        f"{_CHECKPOINTS}::test_a_checkpoint_stays_what_it_was_whoever_writes_it_again",
    ),
    Mutant(
        "checkpoints: what is removed loses its manifest first",
        "app/stores/objects/removal.py",
        "not key.endswith",
        "key.endswith",
        f"{_CHECKPOINTS}::test_a_removal_that_dies_in_the_middle_leaves_no_half_checkpoint",
    ),
    Mutant(
        "folder store: create only",
        "app/stores/objects/folder.py",
        "os.link(temporary, target)",
        "temporary.replace(target)",
        "tests/conformance/test_object_store.py::test_of_concurrent_writers_of_one_key_exactly_one_wins[folder]",
    ),
    Mutant(
        "downloads: sha256",
        "workers/downloads.py",
        "        if found == expected:\n",
        "        if found.size == expected.size:\n",
        f"{_CHECKPOINTS}::test_a_damaged_checkpoint_is_never_handed_out",
    ),
    # Losses: each by a sign and by a mask.
    Mutant(
        "cross_entropy: the sign",
        f"{_FORMULAS}/cross_entropy.py",
        "LossValue(-weights * logprobs",
        "LossValue(weights * logprobs",
        f"{_LOSSES}::test_cross_entropy_takes_any_weight_and_none",
    ),
    Mutant(
        "cross_entropy: what has no weight is not its own",
        f"{_FORMULAS}/cross_entropy.py",
        "(weights != 0).any(-1, keepdim=True)",
        "(weights == weights).any(-1, keepdim=True)",
        f"{_LOSSES}::test_a_position_with_any_weight_is_one_token_of_cross_entropy",
    ),
    Mutant(
        "importance_sampling: the sign",
        f"{_FORMULAS}/importance_sampling.py",
        "policy_value(-ratio",
        "policy_value(ratio",
        f"{_LOSSES}::test_importance_sampling_weighs_advantages_by_the_ratio",
    ),
    Mutant(
        "ppo: the sign",
        f"{_FORMULAS}/ppo.py",
        "policy_value(-objective",
        "policy_value(objective",
        f"{_LOSSES}::test_ppo_stops_the_gradient_only_where_clipping_is_the_worse_side",
    ),
    Mutant(
        "cispo: the sign",
        f"{_FORMULAS}/cispo.py",
        "policy_value(-held",
        "policy_value(held",
        f"{_LOSSES}::test_cispo_keeps_a_gradient_of_the_clipped_ratio",
    ),
    Mutant(
        "dro: the sign of the pull",
        f"{_FORMULAS}/dro.py",
        "policy_value(pull - logprobs",
        "policy_value(-pull - logprobs",
        f"{_LOSSES}::test_dro_pulls_every_token_back",
    ),
    Mutant(
        "gspo: the sign",
        f"{_FORMULAS}/gspo.py",
        "policy_value(-objective",
        "policy_value(objective",
        f"{_LOSSES}::test_gspo_gives_every_token_the_sequence_ratio_and_its_own_gradient",
    ),
    Mutant(
        "gspo: the ratio is that of the marked tokens",
        f"{_FORMULAS}/gspo.py",
        'inputs["sequence_ratio_mask"] != 0',
        'inputs["advantages"] != 0',
        f"{_LOSSES}::test_gspo_gives_every_token_the_sequence_ratio_and_its_own_gradient",
    ),
    Mutant(
        "ppo_critic: the sign",
        f"{_FORMULAS}/ppo_critic.py",
        "loss = 0.5 * weights",
        "loss = -0.5 * weights",
        f"{_LOSSES}::test_ppo_critic_pulls_values_to_their_returns_unless_clipping_is_the_worse_side",
    ),
    Mutant(
        "ppo_critic: the worse side counts",
        f"{_FORMULAS}/ppo_critic.py",
        "torch.maximum(squared_error",
        "torch.minimum(squared_error",
        f"{_LOSSES}::test_ppo_critic_pulls_values_to_their_returns_unless_clipping_is_the_worse_side",
    ),
    Mutant(
        "ppo_critic: what has no weight is not its own",
        f"{_FORMULAS}/ppo_critic.py",
        "own, found = weights != 0,",
        "own, found = weights == weights,",
        f"{_LOSSES}::test_critic_metrics_are_over_tokens_with_a_weight_and_give_the_explained_variance",
    ),
    Mutant(
        "policy losses: a prompt is not their own",
        f"{_FORMULAS}/policy.py",
        'own = inputs["advantages"] != 0',
        'own = inputs["advantages"] == inputs["advantages"]',
        f"{_LOSSES}::test_policy_metrics_leave_the_prompt_out",
    ),
    Mutant(
        "losses: padding",
        "workers/training/jobs.py",
        "torch.where(real, value.per_token, 0.0).sum",
        "value.per_token.sum",
        _PADDING,
    ),
    # Hand-overs.
    Mutant(
        "set_snapshot: what was handed over may have to be made again",
        f"{_LUA}/set_snapshot.lua",
        "<= tonumber(ARGV[3]) then return 0 end",
        "< 0 then return 0 end",
        f"{_HANDOVER}::test_the_journal_reaches_back_before_what_is_not_uploaded_yet",
    ),
    Mutant(
        "admit_sample: a follower's version is the newest",
        f"{_LUA}/prelude.lua",
        "cjson.decode(newest or found[1] or",
        "cjson.decode(found[1] or",
        f"{_HANDOVER}::test_in_flight_samplers_of_a_model_follow_its_newest_save_and_a_snapshot_stays",
    ),
    Mutant(
        "restore: behind a lost hand-over no snapshot is of use",
        "workers/snapshots/restore.py",
        "if local.seq >= before:",
        "if False:",
        f"{_HANDOVER}::test_a_local_snapshot_behind_a_lost_hand_over_is_passed_over",
        slow=True,
    ),
    Mutant(
        "complete: what is there of a generation stays",
        "workers/checkpoints.py",
        "entry if store.put_new(key, folder / name) else _stored_entry(store, key)",
        "entry if store.put_new(key, folder / name) else entry",
        f"{_HANDOVER}::test_two_owners_that_upload_at_once_agree_on_one_of_their_copies",
    ),
    Mutant(
        "adapter turns: newcomers come before more of the same",
        "workers/adapter_turns.py",
        "if adapter_id not in self._running and len(self._running) >= self._most:\n                return",
        "if adapter_id not in self._running and len(self._running) >= self._most:\n                continue",
        "tests/unit/workers/test_adapter_turns.py::test_an_adapter_that_is_in_does_not_keep_the_others_out_for_ever",
        slow=True,
    ),
    # Samples.
    Mutant(
        "close_sample: the first result stays",
        f"{_LUA}/prelude.lua",
        "if redis.call('HGET', future, 'state') ~= 'pending' then return false end",
        "",
        f"{_RESULTS}::test_a_sample_is_deduplicated_claimed_once_and_its_first_result_stays",
    ),
    Mutant(
        "leave_queue: what a request took is given back",
        f"{_LUA}/prelude.lua",
        "    redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, -tokens)\n",
        "",
        f"{_SAMPLES}::test_what_is_finished_makes_room_and_exactly_as_much_as_it_took",
    ),
    Mutant(
        "note_completion: a client is told",
        f"{_LUA}/prelude.lua",
        "  note_completion(sampler, seq, request, keep_s)\n",
        "",
        f"{_STORES}/test_completions.py",
    ),
    Mutant(
        "leave_queue: where it ran it counts no more",
        f"{_LUA}/prelude.lua",
        "    place(request, queue, '')\n",
        "",
        f"{_HOMES}::test_what_ends_or_is_put_off_counts_nowhere",
    ),
    Mutant(
        "admit_sample: nothing for who is gone or not well",
        f"{_LUA}/admit_sample.lua",
        " or found[2] ~= 'true' then",
        " then",
        f"{_HOMES}::test_nothing_goes_to_a_sampler_that_is_gone_or_not_well",
    ),
    Mutant(
        "claim_sample: a home that did not take what it was rung for",
        f"{_LUA}/claim_sample.lua",
        "if not home or (home == before and node ~= before) then",
        "if not home then",
        f"{_HOMES}::test_a_home_that_does_not_take_its_requests_loses_them_and_what_comes",
    ),
    Mutant(
        "abort_sample: its worker is told",
        f"{_LUA}/prelude.lua",
        "  if closed then redis.call('PUBLISH', 'tinsmith:aborted', request) end\n",
        "",
        f"{_SAMPLES}::test_a_cancelled_request_fails_as_the_users_doing_and_never_runs",
    ),
    Mutant(
        "abort_samples: a session that lives again",
        f"{_LUA}/abort_samples.lua",
        "not session or redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))",
        "true",
        f"{_SAMPLES}::test_a_session_that_a_new_sample_brought_back_keeps_what_waits",
    ),
    Mutant(
        "acknowledge: unfinished requests stay",
        "app/stores/redis/completions.py",
        "xx=True, ",
        "",
        f"{_STORES}/test_completions.py::test_an_acknowledged_result_goes_soon_and_an_unfinished_request_stays",
    ),
    Mutant(
        "leases: whoever lost one is told",
        "workers/leases.py",
        "        for tell in lost:\n            tell()\n",
        "",
        f"{_CANCELLING}::test_a_worker_that_missed_the_message_learns_of_it_from_its_lease",
    ),
    # OpenAI's clients.
    Mutant(
        "openai: chat templates run in a sandbox",
        "app/services/openai/templates.py",
        "    environment = ImmutableSandboxedEnvironment(",
        "    from jinja2 import Environment\n    environment = Environment(",
        f"{_OPENAI}/test_tokenizer.py::test_a_template_reaches_nothing_but_what_it_is_given",
    ),
    Mutant(
        "openai: what may become a stop string is held back",
        "app/services/openai/text.py",
        "return len(self._text) - held_back(self._text[self._sent :], self._stops)",
        "return len(self._text)",
        f"{_OPENAI}/test_text.py::test_a_stop_string_is_cut_and_no_part_of_it_shown_before",
    ),
    Mutant(
        "openai: an outage is waited for",
        "app/services/openai/following.py",
        "if not is_outage(error):\n                raise",
        "raise",
        f"{_OPENAI}/test_following.py::test_an_outage_is_waited_for",
    ),
    Mutant(
        "openai: a request whose client left is cancelled",
        "app/services/openai/following.py",
        "if not ended:",
        "if False:",
        "tests/unit/app/routes/test_openai.py::test_a_request_whose_client_left_is_cancelled",
    ),
    Mutant(
        "openai: streamed tokens go by their place",
        "app/services/openai/generation.py",
        "known = text.count - drawn.place",
        "known = 0",
        "tests/unit/app/routes/test_openai.py::test_what_a_stream_lost_or_told_twice_is_made_good_from_the_result",
    ),
    # Tenants and hostile input.
    Mutant(
        "what is somebody else's is not there",
        "app/services/ownership.py",
        "or not caller.sees(found.owner)",
        "",
        "tests/security/test_tenants.py::test_what_is_somebody_elses_is_as_if_it_were_not_there",
    ),
    Mutant(
        "limits: the size a zstd frame says it has",
        "app/limits.py",
        "if size > most:",
        "if False:",
        f"{_LIMITS}::test_a_frame_larger_than_the_limit_is_refused_by_what_its_head_says",
    ),
    Mutant(
        "limits: bytes behind a zstd frame",
        "app/limits.py",
        "allow_extra_data=False",
        "allow_extra_data=True",
        f"{_LIMITS}::test_half_a_frame_or_one_with_something_behind_it_is_never_taken_for_a_body",
    ),
    Mutant(
        "limits: how deep JSON is nested",
        "app/limits.py",
        "if not level:",
        "if level:",
        f"{_LIMITS}::test_levels_are_counted_in_lists_and_objects_alike",
    ),
    Mutant(
        "a checkpoint's files are of kinds that run nothing",
        "workers/checkpoints.py",
        "if not _FILE.fullmatch(name)",
        "if False",
        f"{_BUCKET}::test_a_manifest_that_names_another_kind_of_file_or_place_is_refused",
    ),
)
