"""Guards of trainers (kept state and replays) and of the losses."""

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
_OWNER = "tests/unit/workers/train/test_owner.py"
_LEASES = "tests/unit/workers/process/test_leases.py"
_PADDING = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/test_batch_ops.py"
_PACKING = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/test_packing.py"
_ENGINE = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/test_engine.py"
_SEQUENCE = "--confcutdir=tests/conformance tests/conformance/test_sequence_parallel.py"
_IMAGES = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_images.py"
_IMAGE_FILES = "--confcutdir=tests/unit/app/wire tests/unit/app/wire/test_images.py"
_ROUTES = "tests/unit/app/api/test_router_replay.py"
_UNIT = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training"
_COVERAGE = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_coverage.py"
_QUANTIZED = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_quantized.py"

MUTANTS = (
    # Long datums.
    Mutant(
        "blockwise: queries of a long datum run in blocks",
        "workers/backends/training/blockwise.py",
        "    if length > _WHOLE_UP_TO:\n",
        "    if False:\n",
        f"{_UNIT}/test_blockwise.py::test_no_tensor_of_a_long_datum_grows_with_the_square_of_its_length",
    ),
    Mutant(
        "memory: a pass that does not fit is computed again",
        "workers/backends/training/memory.py",
        "    if tokens * footprint.whole <= usable:\n",
        "    if True:\n",
        f"{_UNIT}/test_memory.py::test_the_choice_keeps_as_much_as_six_tenths_of_the_free_memory_hold",
    ),
    # Weights that an adapter would silently leave out.
    Mutant(
        "coverage: a base model with unknown weights is refused for LoRA",
        "workers/models/base_model.py",
        "if unknown := undecided(model, adapted):",
        "if unknown := []:",
        f"{_COVERAGE}::test_unknown_linears_and_tensors_are_named_once_in_one_line",
    ),
    # Datums in one row that would see each other.
    Mutant(
        "packing: each datum starts from the empty state",
        "workers/backends/training/packing.py",
        "        for count, length in runs or layer.runs:",
        "        for count, length in [(1, hidden_states.shape[1])]:",
        f"{_PACKING}::test_each_datum_starts_from_the_empty_state_under_its_own_adapter",
    ),
    Mutant(
        "engine: layers that would run on are prepared",
        "workers/backends/training/engine.py",
        "            packing.prepare(model)\n",
        "",
        "tests/parity/test_architectures.py::test_packed_datums_have_the_results_they_have_alone[qwen3-next]",
    ),
    Mutant(
        "packing: a share of the row keeps its adapters",
        "workers/backends/training/packing.py",
        "lora.within(segments, rows)",
        "segments",
        f"{_PACKING}::test_each_datum_starts_from_the_empty_state_under_its_own_adapter",
    ),
    Mutant(
        "packing: chunks of a datum do not attend to each other",
        "workers/backends/training/packing.py",
        "        if size := _chunk_size(module):",
        "        if size := None:",
        f"{_PACKING}::test_attention_within_chunks_takes_them_for_datums",
    ),
    Mutant(
        "packing: attention that counts positions counts those of each datum",
        "workers/backends/training/packing.py",
        "_has_state(module) or _counts_positions(module)",
        "_has_state(module)",
        f"{_PACKING}::test_attention_that_counts_positions_gets_each_datum_as_a_row",
    ),
    Mutant(
        "packing: a convolution by itself gets the datums of its own pass",
        "workers/backends/training/packing.py",
        "            convolution.runs = runs\n",
        "            convolution.runs = getattr(convolution, 'runs', runs)\n",
        f"{_PACKING}::test_a_convolution_by_itself_starts_empty_at_each_datum_too",
    ),
    Mutant(
        "engine: an attention sink takes its share",
        "workers/backends/training/engine.py",
        "    if sinks is not None:",
        "    if False:",
        f"{_ENGINE}::test_a_sink_takes_its_share_of_the_attention",
    ),
    Mutant(
        "engine: no argument of an attention call is swallowed",
        "workers/backends/training/engine.py",
        "    use_cache: bool = False,\n",
        "    use_cache: bool = False,\n    **_: Any,\n",
        f"{_ENGINE}::test_an_argument_that_may_change_the_result_is_never_swallowed",
    ),
    # Ranks that share a datum.
    Mutant(
        "sequence parallel: the ranks can share the heads of every layer",
        "workers/backends/training/sequence_parallel.py",
        "one.num_attention_heads % size or one.num_key_value_heads % size",
        "one.num_attention_heads % size",
        f"{_SEQUENCE}::test_a_model_that_ranks_cannot_share_is_refused",
    ),
    Mutant(
        "sequence parallel: a layer that must see a datum whole is not shared",
        "workers/backends/training/sequence_parallel.py",
        "    elif packing.datum_by_datum(model):",
        "    elif False:",
        f"{_SEQUENCE}::test_a_model_that_ranks_cannot_share_is_refused",
    ),
    Mutant(
        "sequence parallel: each token belongs to one rank",
        "workers/backends/training/sequence_parallel.py",
        "        most = -(-tokens // self.size)\n",
        "        most = tokens // self.size\n",
        f"{_SEQUENCE}::test_each_token_belongs_to_one_rank",
    ),
    # Images that nobody may decode, and images that would shift all that follows them.
    Mutant(
        "images: an image of too many pixels is not admitted",
        "app/wire/images.py",
        "    if not 1 <= width * height <= MAX_PIXELS:",
        "    if False:",
        f"{_IMAGE_FILES}::test_a_wrong_image_is_refused_by_datum_and_position",
    ),
    Mutant(
        "images: a JPEG of very many scans is not admitted",
        "app/wire/images.py",
        "_START_OF_SCAN))) > MAX_SCANS:",
        "_START_OF_SCAN))) > 10**9:",
        f"{_IMAGE_FILES}::test_a_wrong_image_is_refused_by_datum_and_position",
    ),
    Mutant(
        "images: an image of too many pixels is not decoded",
        "workers/models/images.py",
        "        if width * height > MAX_PIXELS:",
        "        if False:",
        f"{_IMAGES}::test_a_bomb_and_an_unexpected_size_are_refused_before_they_are_decoded",
    ),
    Mutant(
        "images: an image has as many tokens as its client expects",
        "workers/models/images.py",
        "        if tokens != image.tokens:",
        "        if False:",
        f"{_IMAGES}::test_a_bomb_and_an_unexpected_size_are_refused_before_they_are_decoded",
    ),
    # Quantised weights.
    Mutant(
        "quantised: the head stays as it is",
        "workers/models/quantized_loading.py",
        'for path in (*found["attn"], *found["mlp"])',
        'for path in (*found["attn"], *found["mlp"], *found["unembed"])',
        f"{_QUANTIZED}::test_only_linears_and_experts_that_adapters_cover_are_quantised",
    ),
    Mutant(
        "quantised: routers and the vision tower stay as they are",
        "workers/models/quantized_loading.py",
        "    found = coverage.groups(linears, experts=False)\n",
        '    found = {"attn": [path for path in linears if path != "lm_head"], "mlp": []}\n',
        f"{_QUANTIZED}::test_only_linears_and_experts_that_adapters_cover_are_quantised",
    ),
    Mutant(
        "quantised: autograd keeps the codes alone",
        "workers/models/quantized.py",
        "        is_view = saved.untyped_storage().data_ptr() == at\n",
        "        is_view = False\n",
        f"{_QUANTIZED}::test_autograd_keeps_a_linears_codes_and_not_the_dequantised_tensor",
    ),
    # Router replay.
    Mutant(
        "routes: a sequence of another project has none",
        "app/services/training.py",
        "sampler = load_readable(self._records, Sampler, ids.sampler_of(sequence_id), caller)",
        "sampler = load(Sampler, self._records.get(Sampler.namespace, ids.sampler_of(sequence_id)) or {})",
        f"{_ROUTES}::test_a_sequence_without_routes_is_refused_in_the_same_words_whoever_it_belongs_to",
    ),
    Mutant(
        "routes: a span names the datum's own tokens",
        "app/services/training.py",
        " or not np.array_equal(theirs, self.tokens)",
        "",
        f"{_ROUTES}::test_spans_that_do_not_fit_their_datum_are_refused",
    ),
    Mutant(
        "routes: a repeat of a call is the same call though its routes are not",
        "app/domain/ops.py",
        "if isinstance(op, ForwardBackward) and op.batch.routes is not None:",
        "if False:",
        f"{_ROUTES}::test_a_repeat_of_the_call_gets_the_same_future_whatever_the_routes_are_by_then",
    ),
    Mutant(
        "routes: a recomputed layer takes them too",
        "workers/backends/training/memory.py",
        "with lora.use(adapters), routers.use(routes):",
        "with lora.use(adapters):",
        "tests/parity/test_router_replay.py::test_gradients_of_two_tenants_equal_a_reference_with_forced_experts",
    ),
    Mutant(
        "router replay: a rank takes the routes of its own tokens",
        "workers/backends/training/engine.py",
        "value=NO_ROUTE)[rows]",
        "value=NO_ROUTE)[: rows.stop - rows.start]",
        "tests/conformance/test_sequence_parallel.py"
        "::test_ranks_that_share_each_datum_take_the_routes_of_its_tokens[0]",
        slow=True,
    ),
    Mutant(
        "router replay: beside images",
        "workers/backends/training/engine.py",
        """                with routers.use(routes):
                    return self._seen(tokens, lengths, owners, picture)""",
        """                return self._seen(tokens, lengths, owners, picture)""",
        "tests/parity/test_router_replay.py"
        "::test_gradients_of_text_and_images_equal_a_reference_with_forced_experts[qwen3-vl-moe-False]",
    ),
    # States that may not be used again.
    Mutant(
        "runner: a state whose commit is in doubt goes",
        "workers/train/runner.py",
        "        except Fenced as fenced:\n            self._owner.discard(model_id)\n",
        "        except Fenced as fenced:\n",
        f"{_RECOVERY}::test_a_state_whose_commit_is_in_doubt_is_never_used_again",
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
        "committer: an outage is no attempt",
        "workers/train/committer.py",
        "            for op in group:\n                self._owner.put_off(op.resident.lease, op.entry.seq)\n",
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
        "put-offs: what begins again is not put back",
        "workers/process/liveness.py",
        "            self._waiting.pop(request_id, None)\n",
        "            pass\n",
        f"{_LEASES}::test_what_could_not_be_put_back_is_put_back_with_the_next_renewal",
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
        "workers/backends/training/state.py",
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
        "custom losses: complex numbers",
        "workers/backends/training/losses/custom.py",
        "if isinstance(value, complex) and budget > 1:",
        "if False:",
        "tests/unit/workers/backends/training/losses/test_custom_budget.py::test_a_complex_number_is_refused",
    ),
)
