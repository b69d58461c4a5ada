"""Guards of samples, including those of OpenAI's clients."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_RESULTS = f"{_STORES}/test_results.py"
_SAMPLES = f"{_STORES}/test_samples.py"
_LIMITS = f"{_STORES}/test_limits.py"
_AFFINITY = f"{_STORES}/test_adapter_affinity.py"
_CANCELLING = "tests/unit/workers/sample/test_cancellation.py"
_ENGINES = "--confcutdir=tests/unit/workers/backends/sampling tests/unit/workers/backends/sampling"
_PREEMPTION = f"{_ENGINES}/transformers/test_preemption.py"
_MEMORY = f"{_ENGINES}/transformers/test_engine.py"
_SHARES = f"{_ENGINES}/test_shares.py"
_SLOTS = f"{_ENGINES}/vllm/test_slots.py"
_OPENAI = "--confcutdir=tests/unit/app/services/openai tests/unit/app/services/openai"

_REPLAY = "tests/unit/workers/train/test_router_replay.py"

MUTANTS = (
    # Routes of sampled sequences.
    Mutant(
        "routes: an attempt has files of its own",
        "app/stores/objects/routes.py",
        "uuid.uuid4().hex",
        '"one"',
        f"{_REPLAY}::test_a_paused_worker_that_lost_its_request_changes_no_routes",
    ),
    Mutant(
        "routes: those of a lost attempt are removed",
        "workers/sample/runner.py",
        "self._route_files.remove(routes)",
        "pass",
        f"{_REPLAY}::test_a_paused_worker_that_lost_its_request_changes_no_routes",
    ),
    Mutant(
        "routes: their bytes count",
        f"{_LUA}/limits.lua",
        " + bytes_routed(payer)\n",
        "\n",
        "tests/unit/app/api/test_router_replay.py::test_routes_count_as_stored_bytes_until_their_files_are_removed",
    ),
    Mutant(
        "queue: a project below its share is admitted to a full queue",
        f"{_LUA}/samples.lua",
        "requests >= tonumber(most_requests) and not is_below_share(owner, most_requests)",
        "requests >= tonumber(most_requests)",
        f"{_SAMPLES}::test_a_full_queue_admits_a_project_up_to_its_share_of_the_requests",
    ),
    Mutant(
        "queue: a project's share of a full queue",
        f"{_LUA}/samples.lua",
        "most / (others + 1)",
        "most",
        f"{_SAMPLES}::test_a_full_queue_admits_a_project_up_to_its_share_of_the_requests",
    ),
    Mutant(
        "queue: one request of a project in a queue full of tokens",
        f"{_LUA}/samples.lua",
        "most == '' and 1 or",
        "most == '' and 99 or",
        f"{_SAMPLES}::test_a_queue_full_of_tokens_admits_one_request_of_a_project_that_has_none",
    ),
    Mutant(
        "images: a prompt with images has a pass of its own",
        "workers/backends/sampling/transformers/batch.py",
        " or job.request.images or jobs[0].request.images",
        "",
        "--confcutdir=tests/unit/workers/backends/sampling "
        "tests/unit/workers/backends/sampling/transformers/test_batch.py"
        "::test_a_prompt_with_images_has_a_pass_of_its_own",
    ),
    Mutant(
        "vLLM: a context where it would not scale queries is refused",
        "workers/backends/sampling/vllm/checks.py",
        'rope.get("llama_4_scaling_beta") and max_context > unscaled',
        "False",
        "--confcutdir=tests/unit/workers/backends/sampling "
        "tests/unit/workers/backends/sampling/vllm/test_vllm_setup.py"
        "::test_a_context_where_vllm_would_not_scale_queries_is_refused",
    ),
    Mutant(
        "vllm: latent attention is refused on a CPU",
        "workers/backends/sampling/vllm/checks.py",
        'if not any(hasattr(module, "kv_lora_rank") for module in skeleton.modules()):',
        "if True:",
        "--confcutdir=tests/unit/workers/backends/sampling "
        "tests/unit/workers/backends/sampling/vllm/test_vllm_setup.py::test_latent_attention_is_refused_on_a_cpu",
    ),
    Mutant(
        "vllm: no sampler that nvcc compiles at the start",
        "workers/backends/sampling/vllm/engine.py",
        'os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")',
        "pass",
        "--confcutdir=tests/unit/workers/backends/sampling "
        "tests/unit/workers/backends/sampling/vllm/test_vllm_names.py"
        "::test_on_a_gpu_vllm_takes_no_sampler_that_it_must_compile",
    ),
    Mutant(
        "vllm: heads that its CPU kernels lack are refused",
        "workers/backends/sampling/vllm/checks.py",
        "    if missing:\n",
        "    if False:\n",
        "--confcutdir=tests/unit/workers/backends/sampling "
        "tests/unit/workers/backends/sampling/vllm/test_vllm_setup.py"
        "::test_a_head_of_a_size_that_vllms_cpu_kernels_lack_is_refused",
    ),
    Mutant(
        "vllm: float32 under adapters is refused on a GPU",
        "workers/backends/sampling/vllm/checks.py",
        ' and engine_args["dtype"] == "float32"',
        " and False",
        "--confcutdir=tests/unit/workers/backends/sampling "
        "tests/unit/workers/backends/sampling/vllm/test_vllm_setup.py"
        "::test_a_dtype_that_vllm_does_not_run_on_the_gpu_is_refused",
    ),
    Mutant(
        "vllm: no memory for adapters on experts",
        "workers/backends/sampling/vllm/arguments.py",
        "if not target_modules.has_experts(skeleton):",
        "if True:",
        f"{_ENGINES}/vllm/test_arguments.py::test_vllm_reserves_memory_for_adapters_on_no_expert",
    ),
    Mutant(
        "vllm: loaded adapters fit in their share of the host memory",
        "workers/backends/sampling/vllm/arguments.py",
        "min(sampler.loaded_loras, fit)",
        "sampler.loaded_loras",
        f"{_ENGINES}/vllm/test_arguments.py"
        "::test_no_more_adapters_stay_loaded_than_fit_in_a_quarter_of_the_host_memory",
    ),
    Mutant(
        "vllm: an adapter on a module that vLLM drops is refused",
        "workers/backends/sampling/vllm/weights.py",
        "                self._check_adapted(folder)\n",
        "",
        f"{_ENGINES}/vllm/test_backend.py::test_an_adapter_on_a_module_that_vllm_would_drop_is_refused",
    ),
    Mutant(
        "vllm: a group with a module that vLLM does not adapt is not offered",
        "workers/backends/sampling/vllm/backend.py",
        " and found.issuperset(wanted[group])",
        "",
        f"{_ENGINES}/vllm/test_groups.py::test_a_group_with_a_module_that_vllm_does_not_adapt_is_not_offered",
    ),
    Mutant(
        "vllm: a head that is too large is not declared",
        "workers/backends/sampling/vllm/patches.py",
        " if model.logits_processor.vocab_size <= MOST_HEAD_TOKENS else {}",
        "",
        f"{_ENGINES}/vllm/test_groups.py::test_vllm_is_told_of_a_head_up_to_the_largest_that_it_takes",
    ),
    Mutant(
        "adapters: one that is evicted is not used before it is loaded again",
        "workers/sample/adapters.py",
        "with self._gpu_turn(handle), loading:",
        "with self._gpu_turn(handle):",
        "tests/unit/workers/sample/test_evictions.py"
        "::test_an_adapter_that_is_wanted_again_while_it_is_evicted_is_loaded_again",
    ),
    # Projects share a batch.
    Mutant(
        "batch: a project above its share gives rows up",
        "workers/backends/sampling/transformers/engine.py",
        "(taken := surplus(demands, self._max_batch))",
        "(taken := Counter[str]())",
        f"{_PREEMPTION}::test_a_short_request_of_another_project_ends_within_a_few_steps_of_a_long_one",
    ),
    Mutant(
        "batch: rows that were set aside come back",
        "workers/backends/sampling/transformers/engine.py",
        "resumed = self._batch.choose(granted)",
        "resumed = self._batch.choose({})",
        f"{_PREEMPTION}::test_a_project_gets_its_share_of_the_rows_and_no_more",
        slow=True,
    ),
    Mutant(
        "batch: a row that is set aside keeps its part of the cache",
        "workers/backends/sampling/transformers/batch.py",
        "kv_cache.Part(self._cache, [places[row]], [0])",
        "kv_cache.Part(self._cache, [0], [0])",
        f"{_PREEMPTION}::test_rows_go_on_with_the_same_bits_after_they_were_set_aside",
    ),
    Mutant(
        "batch: a row for which memory is too small joins later",
        "workers/backends/sampling/transformers/engine.py",
        "if self._fits(self._batch.join, rows):",
        "if self._batch.join(rows) is None:",
        f"{_MEMORY}::test_rows_that_memory_is_too_small_for_join_when_others_have_ended",
    ),
    Mutant(
        "batch: a step without memory is repeated",
        "workers/backends/sampling/transformers/engine.py",
        "if self._fits(self._batch.step):",
        "if self._batch.step() is None:",
        f"{_MEMORY}::test_a_step_without_memory_is_repeated",
    ),
    Mutant(
        "batch: columns that a row gave up are computed again",
        "workers/backends/sampling/transformers/jobs.py",
        "np.array(self.tokens[:-1], np.int32)",
        "np.array(self.tokens[1:], np.int32)",
        f"{_MEMORY}::test_a_step_without_memory_is_repeated",
    ),
    Mutant(
        "context: a prompt that fills it may be scored",
        "app/domain/sampling.py",
        "return max_context if self.scores_prompt else max_context - 1",
        "return max_context - 1",
        "tests/unit/app/api/test_sampling.py::test_a_prompt_that_fills_the_context_may_be_scored",
    ),
    Mutant(
        "context: without a score a token must fit behind the prompt",
        "app/domain/sampling.py",
        "return max_context if self.scores_prompt else max_context - 1",
        "return max_context",
        "tests/unit/app/api/test_sampling.py::test_a_bad_sample_is_refused_by_name_and_nothing_is_enqueued",
    ),
    Mutant(
        "shares: rows go to projects below their share first",
        "workers/backends/sampling/shares.py",
        "return has >= share[project], has / demands[project].weight",
        "return False, has / demands[project].weight",
        f"{_SHARES}::test_a_row_that_was_given_up_goes_to_a_project_below_its_share_and_not_back",
    ),
    Mutant(
        "admission: a project below its share waits for nobody's end",
        "workers/sample/admission.py",
        "return self._inside[project] < shares(self._weights, self._batch)[project]",
        "return False",
        "tests/unit/workers/sample/test_fair_batch.py",
        slow=True,
    ),
    Mutant(
        "vLLM: slots in reserve",
        "workers/backends/sampling/vllm/slots.py",
        "return slots + max(1, slots // _RESERVE)",
        "return slots",
        f"{_SLOTS}::test_a_short_request_does_not_wait_for_a_long_one",
    ),
    Mutant(
        "vLLM: the reserve is for projects below their share",
        "workers/backends/sampling/vllm/slots.py",
        " if self._running[name] < share[name]}",
        "}",
        f"{_SLOTS}::test_a_project_alone_has_all_slots_but_the_reserve",
    ),
    # Samples.
    Mutant(
        "close_sample: the first result stays",
        f"{_LUA}/samples.lua",
        "if redis.call('HGET', 'tinsmith:future:' .. request, 'state') ~= 'pending' then return false end",
        "",
        f"{_RESULTS}::test_a_sample_is_deduplicated_claimed_once_and_its_first_result_stays",
    ),
    Mutant(
        "abort_sample: the dashboard sees the end",
        f"{_LUA}/samples.lua",
        "  note_revoked(request)\n",
        "",
        f"{_SAMPLES}::test_a_sample_that_ended_without_a_result_is_reported_once",
    ),
    Mutant(
        "end_calls: the dashboard sees the end",
        f"{_LUA}/lifecycle.lua",
        "      note_revoked(request)\n",
        "",
        f"{_STORES}/test_lifecycle.py::test_the_calls_that_wait_for_an_ended_model_are_reported_once",
    ),
    Mutant(
        "note_revoked: the list has a bound",
        f"{_LUA}/lifecycle.lua",
        "  redis.call('LTRIM', 'tinsmith:revoked', -MOST_REVOKED, -1)\n",
        "",
        f"{_SAMPLES}::test_a_storm_of_cancelled_samples_takes_a_bounded_list",
    ),
    Mutant(
        "settle_stopped: a stopped sample counts what it drew",
        f"{_LUA}/samples.lua",
        "    count_sampled(request, charged.run, usage)\n  end\n",
        "  end\n",
        f"{_LIMITS}::test_a_sample_that_is_called_off_while_it_runs_counts_what_it_drew_once",
    ),
    Mutant(
        "count_sampled: a sample whose sampler has ended",
        f"{_LUA}/samples.lua",
        "  if redis.call('EXISTS', record) == 0 then record = 'tinsmith:ended_samplers:' .. sampler end\n",
        "",
        f"{_LIMITS}::test_a_sample_that_runs_while_its_run_is_deleted_counts_what_it_drew_once",
    ),
    Mutant(
        "end_sampler: the copy of the record expires",
        f"{_LUA}/lifecycle.lua",
        "redis.call('EXPIRE', copy, keep_s)\n",
        "",
        f"{_LIMITS}::test_a_sample_that_runs_while_its_run_is_deleted_counts_what_it_drew_once",
    ),
    Mutant(
        "settle_stopped: once",
        f"{_LUA}/samples.lua",
        "    redis.call('DEL', key)\n    give_back(charged, usage)\n",
        "    give_back(charged, usage)\n",
        f"{_LIMITS}::test_a_sample_that_is_called_off_while_it_runs_counts_what_it_drew_once",
    ),
    Mutant(
        "settle_stopped: only the attempt that was stopped counts",
        f"{_LUA}/samples.lua",
        "  if charged.runner == worker then\n",
        "  if charged.runner then\n",
        f"{_LIMITS}::test_a_sample_that_is_put_back_counts_only_the_attempt_that_ends_it",
    ),
    Mutant(
        "leases: a worker makes one attempt at a request at a time",
        "workers/sample/runner.py",
        "self._running.setdefault(request_id, handle) is not handle",
        "self._running.update({request_id: handle})",
        f"{_CANCELLING}::test_a_request_that_lost_its_lease_runs_again_here_only_when_its_first_attempt_has_ended",
    ),
    Mutant(
        "cancellation: the worker reports what it drew",
        "workers/sample/runner.py",
        "        SAMPLED: handle.sampled_tokens,\n",
        "",
        f"{_CANCELLING}::test_a_request_that_is_cancelled_while_it_runs_is_charged_and_counts_its_prompt_and_what_it_drew_once",
    ),
    Mutant(
        "leave_queue: what a request took is given back",
        f"{_LUA}/samples.lua",
        "    redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, -tokens)\n",
        "",
        f"{_SAMPLES}::test_what_is_finished_makes_room_and_exactly_as_much_as_it_took",
    ),
    Mutant(
        "note_completion: a client is notified",
        f"{_LUA}/samples.lua",
        "  note_completion(sampler, seq, request, keep_s)\n",
        "",
        f"{_STORES}/test_completions.py",
    ),
    Mutant(
        "check_records: no rollouts for a loss that is not offered",
        "app/services/sampling.py",
        '    if asked["record_stability_info"]:\n',
        "    if False:\n",
        "tests/unit/app/api/test_sampling.py::test_a_bad_sample_is_refused_by_name_and_nothing_is_enqueued",
    ),
    Mutant(
        "leave_queue: where it ran it counts no more",
        f"{_LUA}/samples.lua",
        "    place(request, queue, '')\n",
        "",
        f"{_AFFINITY}::test_what_ends_or_is_put_off_counts_nowhere",
    ),
    Mutant(
        "leave_queue: a project no longer counts as dispatched",
        f"{_LUA}/samples.lua",
        "    leave_project(request, queue)\n",
        "",
        f"{_STORES}/test_throttled_dispatch.py::test_cancelled_and_aborted_ones_are_throttled_no_more_and_make_room",
        slow=True,
    ),
    Mutant(
        "look_at: nothing for who is gone or not well",
        f"{_LUA}/dispatch.lua",
        " or found[2] ~= 'true' then",
        " then",
        f"{_AFFINITY}::test_nothing_goes_to_a_sampler_that_is_gone_or_not_well",
    ),
    Mutant(
        "claim_sample: a sampler that did not take what it was sent",
        f"{_LUA}/samples.lua",
        "if not home or (home == before and node ~= before) then",
        "if not home then",
        f"{_AFFINITY}::test_a_sampler_that_does_not_take_its_requests_loses_its_affinity",
    ),
    Mutant(
        "abort_sample: its worker is notified",
        f"{_LUA}/samples.lua",
        "  redis.call('PUBLISH', 'tinsmith:aborted', request)\n",
        "",
        f"{_SAMPLES}::test_a_cancelled_request_fails_as_the_users_doing_and_never_runs",
    ),
    Mutant(
        "admit_sample: a sampler that is gone",
        f"{_LUA}/samples.lua",
        "if not session then return {'unknown', 0} end",
        "",
        "tests/unit/app/api/test_sampling.py::test_a_sampler_that_goes_while_it_is_asked_samples_nothing",
    ),
    Mutant(
        "abort_samples: a session that lives again",
        f"{_LUA}/samples.lua",
        "not session or redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))",
        "true",
        f"{_SAMPLES}::test_a_session_that_a_new_sample_brought_back_keeps_what_waits",
    ),
    Mutant(
        "acknowledge: unfinished requests stay",
        f"{_LUA}/results.lua",
        "ARGV[1], 'XX', 'LT')",
        "ARGV[1], 'LT')",
        f"{_STORES}/test_completions.py::test_an_acknowledged_result_goes_soon_and_an_unfinished_request_stays",
    ),
    Mutant(
        "leases: whoever lost one is notified",
        "workers/process/liveness.py",
        "        for tell in lost:\n            tell()\n",
        "",
        f"{_CANCELLING}::test_a_worker_that_missed_the_message_learns_of_it_from_its_lease",
        slow=True,
    ),
    # OpenAI's clients.
    Mutant(
        "openai: chat templates run in a sandbox",
        "app/services/openai/chat_templates.py",
        "    environment = ImmutableSandboxedEnvironment(",
        "    from jinja2 import Environment\n    environment = Environment(",
        f"{_OPENAI}/test_tokenizer.py::test_a_template_reaches_nothing_but_what_it_is_given",
    ),
    Mutant(
        "openai: what may become a stop string is held back",
        "app/services/openai/generation.py",
        "return self._place(len(self._text) - held_back(self._text, self._stops))",
        "return len(self._text)",
        f"{_OPENAI}/test_generation.py::test_a_stop_string_is_cut_and_no_part_of_it_shown_before",
    ),
    Mutant(
        "anthropic: arguments of a call that are not JSON would break the JSON of the answer",
        "app/services/openai/tool_calls.py",
        ", allow_nan=False",
        "",
        f"{_OPENAI}/test_tool_calls.py::test_what_is_no_call_stays_text",
    ),
    Mutant(
        "openai: a schema that leads back to itself has no end",
        "app/services/openai/json_schema.py",
        "        self._refuse_recursion()\n",
        "",
        f"{_OPENAI}/test_json_schema.py",
    ),
    Mutant(
        "openai: a large schema keeps a sampler busy",
        "app/services/openai/json_schema.py",
        "if self._counts[what] > most:",
        "if False:",
        f"{_OPENAI}/test_json_schema.py",
    ),
    Mutant(
        "openai: an empty range has no grammar",
        "app/services/openai/json_schema.py",
        "    if low > high:",
        "    if False:",
        f"{_OPENAI}/test_json_schema.py",
    ),
    Mutant(
        "openai: a grammar ignores rules beside values",
        "app/services/openai/json_schema.py",
        "if alone and set(rules) - _ALONE[alone] - {alone}:",
        "if False:",
        f"{_OPENAI}/test_json_schema.py",
    ),
    Mutant(
        "openai: an outage is waited for",
        "app/services/openai/streaming.py",
        "if not _passes(error):\n                raise\n            time",
        "raise\n            time",
        f"{_OPENAI}/test_streaming.py::test_an_outage_is_waited_for",
    ),
    Mutant(
        "openai: a request whose client left is cancelled",
        "app/services/openai/streaming.py",
        "if not ended:",
        "if False:",
        "tests/unit/app/api/chat/openai/test_streams.py::test_a_request_whose_client_left_is_cancelled",
    ),
    Mutant(
        "openai: streamed tokens go by their place",
        "app/services/openai/generation.py",
        "known = text.count - chunk.position",
        "known = 0",
        "tests/unit/app/api/chat/openai/test_streams.py::test_what_a_stream_lost_or_sent_twice_is_corrected_from_the_result",
    ),
)
