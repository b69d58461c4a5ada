"""Guards of base models: their layers in a pass, their images, quantised weights and routers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_PACKING = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/test_packing.py"
_ATTENTION = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training/test_attention.py"
_SEQUENCE = "--confcutdir=tests/conformance tests/conformance/test_sequence_parallel.py"
_SPLIT = "--confcutdir=tests/conformance tests/conformance/test_tensor_parallel.py"
_PARTS = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_tensor_parallel.py"
_IMAGES = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_images.py"
_IMAGE_FILES = "--confcutdir=tests/unit/app/wire tests/unit/app/wire/test_images.py"
_ROUTES = "tests/unit/app/api/test_router_replay.py"
_UNIT = "--confcutdir=tests/unit/workers/backends/training tests/unit/workers/backends/training"
_COVERAGE = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_target_modules.py"
_QUANTIZED = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_quantized.py"
_PACKED = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_packed.py"
_EXPERTS = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_experts.py"
_LOADING = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_loading.py"
_GROUPED = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/products/test_grouped.py"
_WEIGHTS_ID = "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_weights_id.py"
_BASE_WEIGHTS = "tests/unit/workers/models/test_base_weights.py"
_SHARDED = "--confcutdir=tests/conformance tests/conformance/test_sharded_loading.py"

MUTANTS = (
    # The weights that runs depend on.
    Mutant(
        "base weights: others than those of the runs are refused",
        "workers/models/loading/base_weights.py",
        'if noted not in ("", found) and not base.weights_id:',
        "if False:",
        f"{_BASE_WEIGHTS}::test_the_weights_of_the_first_start_are_noted_and_others_refused_until_they_are_back",
    ),
    Mutant(
        "base weights: others than those of the settings are refused",
        "workers/models/loading/base_weights.py",
        'if base.weights_id not in ("", found):',
        "if False:",
        f"{_BASE_WEIGHTS}::test_weights_without_the_id_of_the_settings_are_refused_and_not_noted",
    ),
    Mutant(
        "base weights: the first note stays",
        "app/stores/redis/lua/records.lua",
        "(not noted or ARGV[3] == '1')",
        "true",
        "tests/unit/app/stores/redis/test_records.py"
        "::test_the_first_id_of_a_base_models_weights_stays_until_another_replaces_it_on_purpose",
    ),
    Mutant(
        "base weights: those that cannot be loaded leave no note",
        "workers/models/loading/base_weights.py",
        "_check(records, base, note=False)",
        "_check(records, base, note=True)",
        f"{_BASE_WEIGHTS}::test_weights_that_cannot_be_loaded_leave_no_note",
    ),
    Mutant(
        "weights id: in no step with the layers",
        "workers/models/loading/weights_id.py",
        "key=lambda name: hashlib.sha256(name.encode()).digest())[:_SAMPLED_TENSORS]",
        "key=str)[:: max(1, len(tensors) // _SAMPLED_TENSORS)]",
        f"{_WEIGHTS_ID}::test_every_kind_of_weight_is_sampled_in_a_model_of_64_equal_layers",
    ),
    # ZeRO stage 3.
    Mutant(
        "sharded loading: a parameter is split when it is read",
        "workers/backends/training/backends.py",
        "    if settings.trainer.zero_stage < 3:\n",
        "    if True:\n",
        f"{_SHARDED}::test_no_rank_holds_the_whole_base_while_it_loads[cast]",
    ),
    Mutant(
        "sharded loading: tied parameters are compared before they are split",
        "workers/models/loading/sharded.py",
        "if name in self.quantizer.whole:",
        "if False:",
        f"{_LOADING}::test_a_head_that_is_stored_beside_its_embedding_is_tied_if_it_is_the_same",
    ),
    Mutant(
        "sharded loading: weights have the shapes of their model",
        "workers/models/loading/sharded.py",
        "wanted.shape != tensor.shape:",
        "False:",
        f"{_LOADING}::test_weights_that_do_not_fit_are_named_with_the_cause",
    ),
    Mutant(
        "sharded loading: what was split is not missing",
        "workers/models/loading/sharded.py",
        "            missing_keys.discard(name)\n",
        "",
        f"{_LOADING}::test_all_parameters_but_those_that_are_tied_are_split",
    ),
    Mutant(
        "sharded loading: a failure is raised as it is",
        "workers/models/loading/sharded.py",
        "                self.quantizer.failure = error\n",
        "                raise\n",
        f"{_LOADING}::test_running_out_of_memory_may_pass_also_where_a_share_is_kept",
    ),
    Mutant(
        "sharded loading: parameters that transformers keeps in fp32 have the dtype of the others",
        "workers/models/loading/sharded.py",
        "tensor.to(config.dtype)",
        "tensor",
        f"{_LOADING}::test_split_parameters_have_one_dtype_as_deepspeed_demands",
    ),
    Mutant(
        "full fine-tuning: a rank keeps the weights that it owns alone",
        "workers/models/base_model.py",
        "        if name not in kept:\n",
        "        if False:\n",
        "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_full_weights.py"
        "::test_a_rank_reads_the_weights_that_it_keeps_and_of_the_others_the_names",
    ),
    # Long datums.
    Mutant(
        "attention: queries of a long datum run in blocks",
        "workers/backends/training/attention.py",
        "    if length > _WHOLE_UP_TO:\n",
        "    if False:\n",
        f"{_UNIT}/test_long_attention.py::test_no_tensor_of_a_long_datum_grows_with_the_square_of_its_length",
    ),
    Mutant(
        "memory: a pass that does not fit is computed again",
        "workers/backends/training/memory.py",
        "if tokens * footprint.peak(again) <= usable)",
        "if True)",
        f"{_UNIT}/test_memory.py::test_no_more_layers_are_computed_again_than_do_not_fit",
    ),
    Mutant(
        "memory: the first layers are computed again, not the last",
        "workers/backends/training/memory.py",
        "= place < count",
        "= place >= len(self._layers) - count",
        "tests/parity/test_memory.py"
        "::test_sixteen_uneven_tenants_have_the_same_bits_whichever_layers_are_computed_again[1-torch]",
    ),
    Mutant(
        "memory: layers of a vision tower do not count",
        "workers/backends/training/memory.py",
        "self._layers = [*many, *(",
        "self._layers = [*(",
        f"{_UNIT}/test_memory.py::test_layers_of_a_vision_tower_are_neither_counted_nor_computed_again",
    ),
    Mutant(
        "memory: the head's part of a GPU is not used twice",
        "workers/backends/training/memory.py",
        "(free - head) * (_USABLE if trained else USABLE_ON_GPU)",
        "free * (_USABLE if trained else USABLE_ON_GPU)",
        f"{_UNIT}/test_memory.py::test_of_a_gpus_memory_the_head_takes_its_part_and_gradients_a_fifth_of_the_rest",
    ),
    Mutant(
        "passes: a chunk's logits stop growing with the vocabulary",
        "workers/backends/training/lm_head.py",
        " * _WIDE // max(_WIDE, width))",
        ")",
        f"{_UNIT}/test_passes.py::test_the_logits_of_a_chunk_stop_growing_with_the_vocabulary",
    ),
    # Weights that an adapter would silently leave out.
    Mutant(
        "target modules: a base model with unknown weights is refused for LoRA",
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
        "lora.use(segments.part(rows))",
        "lora.use(segments)",
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
        "attention: an attention sink takes its share",
        "workers/backends/training/attention.py",
        "    if sinks is not None:",
        "    if False:",
        f"{_ATTENTION}::test_a_sink_takes_its_share_of_the_attention",
    ),
    Mutant(
        "attention: no argument of an attention call is swallowed",
        "workers/backends/training/attention.py",
        "    use_cache: bool = False,\n",
        "    use_cache: bool = False,\n    **_: Any,\n",
        f"{_ATTENTION}::test_an_argument_that_may_change_the_result_is_never_swallowed",
    ),
    # Ranks that share a datum.
    Mutant(
        "sequence parallel: the ranks can share the heads of every layer",
        "workers/backends/training/sequence_parallel.py",
        "(kv_heads % size == 0 or (one_for_several and size % kv_heads == 0))",
        "True",
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
    # Ranks that split the layers.
    Mutant(
        "tensor parallel: what adapters sit on is split",
        "workers/models/tensor_parallel.py",
        "    whole = [path for path in map(experts.module_path, adapted) if path not in styles]\n",
        "    whole: list[str] = []\n",
        f"{_SPLIT}::test_a_model_whose_layers_ranks_cannot_split_is_refused",
    ),
    Mutant(
        "tensor parallel: each rank has equally many heads, units and experts",
        "workers/models/tensor_parallel.py",
        "            if getattr(module, shared) * _copies(model, path, self._size) % self._size:\n",
        "            if False:\n",
        f"{_SPLIT}::test_a_model_whose_layers_ranks_cannot_split_is_refused",
    ),
    Mutant(
        "tensor parallel: a bias counts once",
        "workers/models/tensor_parallel.py",
        "            if self._rank:  # the ranks'",
        "            if False:  # the ranks'",
        f"{_PARTS}::test_the_parts_of_a_linear_with_their_parts_of_an_adapter_make_the_whole[llama]",
    ),
    Mutant(
        "tensor parallel: another rank's experts count for nothing here",
        "workers/models/experts.py",
        "        return x if self._unused is None else x.masked_fill(self._unused[:, None], 0)\n",
        "        return x\n",
        f"{_PARTS}::test_experts_of_another_rank_count_for_nothing",
    ),
    Mutant(
        "experts: spare rows are zeros",
        "workers/models/experts.py",
        "unused = torch.ones_like(tokens, dtype=torch.bool).index_fill(0, rows, False)",
        "pass",
        f"{_EXPERTS}::test_a_row_that_is_not_finite_fills_up_no_other_group",
    ),
    Mutant(
        "tensor parallel: no other setting that does not go with it",
        "app/settings/workers.py",
        "        if wrong or full:\n",
        "        if False:\n",
        "tests/unit/app/stack/test_checks.py::test_a_setting_beside_split_layers_is_refused",
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
    Mutant(
        "loading: weights that are not in the files are no random ones",
        "workers/models/base_model.py",
        "    _check_whole(report)\n    _name(model",
        "    _name(model",
        "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_loading.py"
        "::test_weights_that_do_not_fit_are_named_with_the_cause",
    ),
    # Base models that are published in 4 or 8 bits.
    Mutant(
        "packed: codes that no format explains are no weights",
        "workers/models/packed.py",
        "    if strange := sorted(key for key in rest if dtypes[key].startswith(_CODES)):",
        "    if strange := []:",
        f"{_PACKED}::test_codes_that_the_format_does_not_explain_are_refused",
    ),
    Mutant(
        "packed: another format is refused",
        "workers/models/packed.py",
        "    if found is None:\n",
        "    if False:\n",
        f"{_PACKED}::test_another_format_is_refused_at_the_start_in_one_line",
    ),
    # Quantised weights.
    Mutant(
        "quantised: the head stays as it is",
        "workers/models/loading/quantized.py",
        'for path in (*found["attn"], *found["mlp"])',
        'for path in (*found["attn"], *found["mlp"], *found["unembed"])',
        f"{_QUANTIZED}::test_only_linears_and_experts_that_adapters_cover_are_quantised",
    ),
    Mutant(
        "quantised: routers and the vision tower stay as they are",
        "workers/models/loading/quantized.py",
        "    found = target_modules.groups(linears, experts=False)\n",
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
        "routes: a batch as JSON has no spans",
        "app/wire/json_bodies.py",
        "[()] * datums",
        "[]",
        f"{_ROUTES}::test_a_batch_as_json_has_no_routes",
    ),
    Mutant(
        "routes: a recomputed layer takes them too",
        "workers/backends/training/memory.py",
        "with lora.use(adapters), routers.use(recorder):",
        "with lora.use(adapters):",
        "tests/parity/test_router_replay.py::test_gradients_of_two_tenants_equal_a_reference_with_forced_experts",
    ),
    Mutant(
        "router replay: a rank takes the routes of its own tokens",
        "workers/models/routers.py",
        "given = self.given[rows]",
        "given = self.given[: rows.stop - rows.start]",
        "tests/conformance/test_sequence_parallel.py"
        "::test_ranks_that_share_each_datum_take_the_routes_of_its_tokens[0]",
        slow=True,
    ),
    Mutant(
        "router replay: beside images",
        "workers/backends/training/engine.py",
        """                with _routed(routing, slice(0, len(tokens))):
                    return self._seen(tokens, lengths, owners, picture)""",
        """                return self._seen(tokens, lengths, owners, picture)""",
        "tests/parity/test_router_replay.py"
        "::test_gradients_of_text_and_images_equal_a_reference_with_forced_experts[qwen3-vl-moe-False]",
    ),
    Mutant(
        "load of experts: the ranks' counts are added up",
        "workers/backends/training/passes.py",
        "            found.append(self._load)\n",
        "",
        "tests/conformance/test_sequence_parallel.py::test_ranks_with_datums_of_their_own_take_the_routes_of_these[2]",
        slow=True,
    ),
    Mutant(
        "load of experts: each Op has its own",
        "workers/backends/training/passes.py",
        "ops = np.concatenate([np.full(share.tokens, share.job) for share in batch.shares])",
        "ops = np.concatenate([np.full(share.tokens, 0) for share in batch.shares])",
        "tests/parity/test_router_replay.py"
        "::test_the_metrics_of_each_tenant_tell_how_its_tokens_are_spread_over_the_experts[qwen3-moe-False]",
    ),
    # Adapters on a GPU.
    Mutant(
        "grouped products: an output is taken for the input that it was made of",
        "workers/models/lora.py",
        "if read is x and made is not None:",
        "if made is not None:",
        f"{_GROUPED}::test_a_linear_that_reads_another_input_after_all_is_computed_for_that",
    ),
    Mutant(
        "grouped products: a gradient reaches the whole of a parameter that a rank has a part of",
        "workers/models/products/grouped.py",
        "        torch.autograd.backward([parameter for parameter, _ in computed], [part for _, part in computed])\n",
        "        pass\n",
        f"{_GROUPED}::test_gradients_reach_parameters_of_which_a_pass_has_a_part",
    ),
    Mutant(
        "grouped products: a second use of a linear adds to the gradient",
        "workers/models/products/grouped.py",
        "total.add_(part)",
        "total.copy_(part)",
        f"{_GROUPED}::test_a_linear_that_a_pass_uses_twice_learns_from_both_uses",
    ),
    Mutant(
        "grouped products: an adapter of another rank is no row of the stacks",
        "workers/models/lora.py",
        "adapter.spec.rank != rank",
        "False",
        f"{_GROUPED}::test_a_pass_of_two_micro_batches_adds_up_however_each_stacks_its_adapters[joined-no_row]",
    ),
    Mutant(
        "grouped products: a part begins with the segment of its first row",
        "workers/models/lora.py",
        "bisect_right(ends, rows.start)",
        "0",
        f"{_GROUPED}::test_a_layer_that_runs_datum_by_datum_stacks_nothing",
    ),
)
