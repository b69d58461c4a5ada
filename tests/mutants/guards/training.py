"""Guards of trainers (kept state, replays, their GPUs) and of the losses."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_OPLOG = f"{_STORES}/test_journal.py"
_RECOVERY = "tests/property/test_recovery.py"
_FORMULAS = "workers/backends/training/losses"
_LOSSES = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/losses/test_losses.py"
_OUTAGES = "tests/unit/workers/train/test_outages.py"
_FAULTS = "tests/unit/workers/train/test_restore_faults.py"
_OWNER = "tests/unit/workers/train/test_owner.py"
_OVERFLOW = "tests/unit/workers/train/test_overflow.py"
_LEASES = "tests/unit/workers/process/test_leases.py"
_PADDING = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/test_batch_ops.py"
_CLI = "tests/processes/workers/test_cli.py"
_PLACEMENT = "--confcutdir=tests/unit/app/stack tests/unit/app/stack/test_placement.py"
_NODES = "tests/processes/workers/process/test_multinode.py"

MUTANTS = (
    # States that may not be used again.
    Mutant(
        "runner: a state whose commit is in doubt goes",
        "workers/train/runner.py",
        "        except Fenced as fenced:\n            self._owner.discard(model_id)\n",
        "        except Fenced as fenced:\n",
        f"{_RECOVERY}::test_a_state_whose_commit_is_in_doubt_is_never_used_again",
    ),
    Mutant(
        "committer: a state that a step spoiled goes",
        "workers/train/committer.py",
        "        if op_result.spoils:\n",
        "        if False:\n",
        f"{_OVERFLOW}::test_a_step_that_overflows_fails_with_its_rate_and_leaves_the_weights_and_the_optimizer",
    ),
    Mutant(
        "committer: no snapshot of a state that has gone",
        "workers/train/committer.py",
        "        if self._owner.resident(resident.model_id) is resident:",
        "        if True:",
        f"{_OVERFLOW}::test_no_snapshot_is_taken_of_a_spoiled_state",
    ),
    Mutant(
        "runner: an Op runs on no state that has gone",
        "workers/train/runner.py",
        "                if self._owner.resident(model_id) is resident:",
        "                if True:",
        f"{_OVERFLOW}::test_a_step_that_ran_ahead_of_a_save_is_committed_behind_it",
    ),
    Mutant(
        "runner: all states go when the backend broke",
        "workers/train/runner.py",
        "        self._owner.discard_all()\n",
        "",
        f"{_RECOVERY}::test_a_state_beside_a_device_error_is_thrown_away",
    ),
    Mutant(
        "owner: an Op has so many attempts",
        "workers/train/owner.py",
        "        if entry is not None and entry.attempts >= MAX_ATTEMPTS:",
        "        if False:",
        f"{_RECOVERY}::test_an_op_that_always_breaks_its_worker_is_given_up",
    ),
    Mutant(
        "owner: a restore that has ended is no attempt",
        "workers/train/owner.py",
        "        self.put_off(lease, lease.applied + 1)\n        return restored\n",
        "        return restored\n",
        f"{_OWNER}::test_a_death_between_a_restore_and_the_op_it_was_for_is_no_attempt",
    ),
    Mutant(
        "commits: a state whose large result lapsed is discarded",
        "workers/train/committer.py",
        "except (Unavailable, redis.RedisError) as error:\n            # The commit",
        "except redis.RedisError as error:\n            # The commit",
        "tests/unit/workers/train/test_runner_faults.py"
        "::test_a_gradient_whose_result_lapsed_before_its_commit_counts_once",
    ),
    Mutant(
        "committer: an outage is no attempt",
        "workers/train/committer.py",
        "                self._owner.put_off(op.resident.lease, op.entry.seq)\n",
        "",
        f"{_OUTAGES}::test_an_op_that_was_left_in_an_outage_counts_no_later_death_of_its_worker",
    ),
    Mutant(
        "put-offs: what could not be put back is put back later",
        "workers/process/liveness.py",
        "                self.put_offs.flush()\n",
        "",
        f"{_LEASES}::test_what_could_not_be_put_back_is_put_back_with_the_next_renewal",
        slow=True,
    ),
    Mutant(
        "put-offs: what begins again is put back before",
        "workers/process/liveness.py",
        "            if request_id in self._waiting:\n",
        "            if False:\n",
        f"{_LEASES}::test_a_request_begins_again_once_it_is_put_back_and_is_not_put_back_later",
    ),
    Mutant(
        "begin: an Op that killed its worker had an attempt",
        f"{_LUA}/leases.lua",
        "if found[1] then former[found[1]] = former[found[1]] or 0 end",
        "",
        f"{_RECOVERY}::test_an_op_that_always_kills_its_worker_is_given_up",
    ),
    Mutant(
        "begin: a worker with a heartbeat did not die",
        f"{_LUA}/leases.lua",
        "if boot == worker or is_heard(boot, worker) then",
        "if boot == worker then",
        f"{_OPLOG}::test_a_worker_that_was_cut_off_had_no_attempt_unless_it_dies_later",
    ),
    Mutant(
        "begin: the process before a new one of its node is dead",
        f"{_LUA}/leases.lua",
        "if node_of(boot) == node_of(worker) then redis.call('DEL', life) end",
        "",
        f"{_OPLOG}::test_a_process_whose_node_has_restarted_is_dead_although_it_renewed_its_leases",
    ),
    Mutant(
        "leave: who left an Op did not die of it, whoever owns the model by now",
        f"{_LUA}/leases.lua",
        "if former[worker] then",
        "if false then",
        f"{_OPLOG}::test_a_worker_that_left_an_op_which_others_took_over_has_no_attempt_even_if_it_dies_later",
    ),
    Mutant(
        "owner: an Op is not given up while a worker may be cut off",
        "workers/train/owner.py",
        "            if entry.in_doubt:",
        "            if False:",
        f"{_OUTAGES}::test_an_op_is_given_up_only_when_those_that_tried_it_are_dead[True]",
    ),
    Mutant(
        "samples: a request is not given up while a worker may be cut off",
        "workers/sample/runner.py",
        "            if entry.in_doubt:",
        "            if False:",
        "tests/unit/workers/sample/test_runner.py::test_a_request_that_keeps_killing_samplers_is_given_up",
    ),
    # Losses: each by a sign and by a mask.
    Mutant(
        "cross_entropy: the sign",
        f"{_FORMULAS}/formulas.py",
        "LossValue(-weights * logprobs",
        "LossValue(weights * logprobs",
        f"{_LOSSES}::test_cross_entropy_takes_any_weight_and_none",
    ),
    Mutant(
        "cross_entropy: what has no weight is not its own",
        f"{_FORMULAS}/formulas.py",
        "(weights != 0).any(-1, keepdim=True)",
        "(weights == weights).any(-1, keepdim=True)",
        f"{_LOSSES}::test_a_position_with_any_weight_is_one_token_of_cross_entropy",
    ),
    Mutant(
        "importance_sampling: the sign",
        f"{_FORMULAS}/formulas.py",
        "policy_value(-ratio",
        "policy_value(ratio",
        f"{_LOSSES}::test_importance_sampling_weighs_advantages_by_the_ratio",
    ),
    Mutant(
        "ppo: the sign",
        f"{_FORMULAS}/formulas.py",
        "    return policy_value(-objective, logprobs, inputs, ratio, clipped)\n\n\ndef cispo",
        "    return policy_value(objective, logprobs, inputs, ratio, clipped)\n\n\ndef cispo",
        f"{_LOSSES}::test_ppo_stops_the_gradient_only_where_clipping_is_the_worse_side",
    ),
    Mutant(
        "cispo: the sign",
        f"{_FORMULAS}/formulas.py",
        "policy_value(-clipped",
        "policy_value(clipped",
        f"{_LOSSES}::test_cispo_keeps_a_gradient_of_the_clipped_ratio",
    ),
    Mutant(
        "dro: the sign of the pull",
        f"{_FORMULAS}/formulas.py",
        "policy_value(pull - logprobs",
        "policy_value(-pull - logprobs",
        f"{_LOSSES}::test_dro_pulls_every_token_back",
    ),
    Mutant(
        "gspo: the sign",
        f"{_FORMULAS}/formulas.py",
        "    return policy_value(-objective, logprobs, inputs, ratio, clipped)\n\n\ndef dro",
        "    return policy_value(objective, logprobs, inputs, ratio, clipped)\n\n\ndef dro",
        f"{_LOSSES}::test_gspo_gives_every_token_the_sequence_ratio_and_its_own_gradient",
    ),
    Mutant(
        "gspo: the ratio is that of the marked tokens",
        f"{_FORMULAS}/formulas.py",
        'inputs["sequence_ratio_mask"] != 0',
        'inputs["advantages"] != 0',
        f"{_LOSSES}::test_gspo_gives_every_token_the_sequence_ratio_and_its_own_gradient",
    ),
    Mutant(
        "ppo_critic: the sign",
        f"{_FORMULAS}/formulas.py",
        "loss = 0.5 * weights",
        "loss = -0.5 * weights",
        f"{_LOSSES}::test_ppo_critic_pulls_values_to_their_returns_unless_clipping_is_the_worse_side",
    ),
    Mutant(
        "ppo_critic: the worse side counts",
        f"{_FORMULAS}/formulas.py",
        "torch.maximum(squared_error",
        "torch.minimum(squared_error",
        f"{_LOSSES}::test_ppo_critic_pulls_values_to_their_returns_unless_clipping_is_the_worse_side",
    ),
    Mutant(
        "ppo_critic: what has no weight is not its own",
        f"{_FORMULAS}/formulas.py",
        "own, found = weights != 0,",
        "own, found = weights == weights,",
        f"{_LOSSES}::test_critic_metrics_are_over_tokens_with_a_weight_and_give_the_explained_variance",
    ),
    Mutant(
        "policy losses: a prompt is not their own",
        f"{_FORMULAS}/formulas.py",
        'own = inputs["advantages"] != 0',
        'own = inputs["advantages"] == inputs["advantages"]',
        f"{_LOSSES}::test_policy_metrics_leave_the_prompt_out",
    ),
    Mutant(
        "losses: padding",
        "workers/backends/training/batch_ops.py",
        "torch.where(real, value.per_token, 0.0).sum",
        "value.per_token.sum",
        _PADDING,
    ),
    Mutant(
        "load_weights: an adapter of another scale",
        "workers/backends/training/states/adapter.py",
        "if self.adapter.scaling != other.adapter.scaling:",
        "if False:",
        "tests/conformance/test_training_checkpoints.py::test_an_adapter_of_another_shape_changes_nothing[spec2-torch]",
    ),
    # The ports of ranks.
    Mutant(
        "ranks: the store of hosts listens on one address",
        "workers/backends/training/ranks.py",
        "wait_for_workers=False, master_listen_fd=listening.detach())",
        "wait_for_workers=False, use_libuv=bool(listening.close() or True))",
        "tests/unit/workers/backends/training/test_ranks.py"
        "::test_the_store_of_several_hosts_listens_on_the_first_ones_address_only",
    ),
    # Custom losses.
    Mutant(
        "custom losses: the price of a slow operation",
        "workers/backends/training/losses/custom_budget.py",
        """    "logit": (256, 256, 512),\n""",
        "",
        "tests/unit/workers/backends/training/losses/test_custom_budget.py::test_an_element_counts_for_what_it_costs",
    ),
    Mutant(
        "custom losses: memory that is short is no fault of theirs",
        "workers/backends/training/losses/custom.py",
        "        if type(error) is RuntimeError and ran_out_of_memory(error):\n            raise\n",
        "",
        "tests/unit/workers/backends/training/losses/test_custom.py::test_memory_that_is_short_is_no_fault_of_the_loss",
    ),
    Mutant(
        "custom losses: complex numbers",
        "workers/backends/training/losses/custom.py",
        "if isinstance(value, complex) and budget > 1:",
        "if False:",
        "tests/unit/workers/backends/training/losses/test_custom_budget.py::test_a_complex_number_is_refused",
    ),
    # Each process sees its own GPUs, before torch or DeepSpeed look.
    Mutant(
        "gpus: a trainer, its launcher and its ranks are bound",
        "workers/cli.py",
        "        bind_gpus(gpus)\n",
        "",
        f"{_CLI}::test_launcher_and_ranks_see_the_named_gpus_in_their_order_and_a_rank_its_number",
    ),
    Mutant(
        "gpus: a sampler is bound",
        "workers/cli.py",
        "        bind_gpus(_gpus(",
        "        print(_gpus(",
        f"{_CLI}::test_a_worker_of_one_process_is_bound_before_it_imports_torch",
    ),
    Mutant(
        "gpus: a rank has the one of its number",
        "workers/backends/training/backends.py",
        'torch.device("cuda", local_rank)',
        'torch.device("cuda", (settings.devices or range(seen))[local_rank])',
        "tests/unit/workers/backends/training/test_backends.py",
    ),
    Mutant(
        "gpus: a host of a hostfile has the named ones",
        "workers/process/multinode.py",
        "list(devices or range(slots))[:slots]",
        "list(range(slots))",
        f"{_NODES}::test_the_ranks_of_a_host_see_as_many_of_the_named_gpus_as_it_has_slots_and_their_copys_port",
    ),
    Mutant(
        "gpus: a copy has its own",
        "workers/cli.py",
        "return copies[copy]",
        "return copies[0]",
        f"{_CLI}::test_a_worker_of_one_process_is_bound_before_it_imports_torch",
    ),
    Mutant(
        "gpus: each worker gets the number of its copy",
        "app/stack/up.py",
        '"--copy", str(copy), ',
        "",
        "tests/processes/app/stack/test_up.py::test_the_table_starts_each_worker_once_under_a_name_of_its_own",
    ),
    Mutant(
        "gpus: workers that name none get some of their own",
        "app/stack/up.py",
        "    settings = placement.place(settings, gpus)\n",
        "",
        "tests/processes/app/stack/test_up.py::test_workers_that_name_no_gpu_get_one_each_of_those_that_are_there",
    ),
    Mutant(
        "gpus: the named ones are checked",
        "app/stack/checks.py",
        "    placement.check(settings)\n",
        "",
        "tests/unit/app/stack/test_checks.py::test_the_gpus_that_are_named_are_checked",
    ),
    Mutant(
        "gpus: their memory is not given twice",
        "app/stack/placement.py",
        "used[gpu] + share <= 1 + _ROUNDING",
        "True",
        _PLACEMENT,
    ),
    Mutant(
        "gpus: free ones first",
        "app/stack/placement.py",
        ", key=used.__getitem__",
        "",
        _PLACEMENT,
    ),
    Mutant(
        "gpus: each copy's memory share counts",
        "app/stack/placement.py",
        "shares[gpu].get(name, 0.0) + section",
        "section",
        _PLACEMENT,
    ),
    Mutant(
        "backoff: no restore before its time",
        "workers/train/runner.py",
        "is None and self._retry_backoff.holds_back(model_id)",
        "is None and False",
        f"{_FAULTS}::test_a_model_that_cannot_be_restored_is_tried_once_in_a_pause_and_none_of_its_calls_is_lost",
    ),
    Mutant(
        "gpus: those of a hostfile's ranks are not given away",
        "app/stack/placement.py",
        "if gpu not in ranks",
        "if True",
        _PLACEMENT,
    ),
)
