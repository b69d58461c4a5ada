"""Guards of saves, of shared-memory transfers, and of the progress of runs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_OPLOG = f"{_STORES}/test_journal.py"
_PROGRESS = f"{_STORES}/test_progress.py"
_JOURNAL = "tests/property/test_journal.py"
_RECOVERY = "tests/property/test_recovery.py"
_CHECKPOINTS = "tests/property/test_checkpoints.py"
_SAVES = "tests/unit/workers/train/test_committer.py"
_AHEAD = "tests/unit/workers/train/test_run_ahead.py"
_ORPHANS = "tests/unit/workers/maintenance/test_orphans.py"
_FOLDER = "tests/unit/app/stores/objects/test_folder.py"
_COPIES = "tests/unit/app/api/test_copies.py"
_UPLOADS = "tests/unit/app/api/test_uploads.py"
_UPLOAD_STORAGE = "tests/unit/app/api/test_upload_storage.py"
_TRANSFER = "tests/unit/workers/checkpoints/test_shm_transfer.py"

_ADAPTERS = "tests/unit/workers/maintenance/test_adapters.py"
_TASK = "workers/maintenance/adapters.py"

MUTANTS = (
    # Progress: bounded, of training alone, and gone with its run.
    Mutant(
        "progress: only the newest points",
        f"{_LUA}/journal.lua",
        "'MAXLEN', MOST_POINTS, '*'",
        "'*'",
        f"{_PROGRESS}::test_only_the_newest_points_are_kept",
    ),
    Mutant(
        "progress: only the newest metrics of a client",
        f"{_LUA}/records.lua",
        "'MAXLEN', MOST_POINTS, '*'",
        "'*'",
        f"{_PROGRESS}::test_metrics_of_a_client_are_kept_in_their_order_and_bounded",
    ),
    Mutant(
        "progress: a run that ended",
        f"{_LUA}/lifecycle.lua",
        ", 'tinsmith:progress:' .. model, ",
        ", ",
        f"{_PROGRESS}::test_it_is_gone_with_its_run",
    ),
    Mutant(
        "progress: a forward trains nothing",
        "app/domain/progress.py",
        "ForwardBackward(forward_only=False)",
        "ForwardBackward()",
        "tests/unit/app/domain/test_progress.py::test_a_step_has_its_metrics_and_a_forward_and_a_load_no_point",
    ),
    Mutant(
        "progress: an event of a client that is repeated",
        f"{_LUA}/records.lua",
        "  if not known[ARGV[i]] then\n",
        "  if true then\n",
        "tests/unit/app/api/test_client.py::test_metrics_of_a_repeated_call_are_kept_once",
    ),
    # Adapters of saves without a path.
    Mutant(
        "adapters: a request that comes meanwhile",
        "app/stores/redis/lua/lifecycle.lua",
        "redis.call('EXISTS', 'tinsmith:sampled:' .. id, 'tinsmith:handovers:' .. prefix)",
        "redis.call('EXISTS', 'tinsmith:handovers:' .. prefix)",
        f"{_ADAPTERS}::test_a_request_that_comes_while_a_round_decides_keeps_its_adapter",
    ),
    Mutant(
        "adapters: the last request",
        "app/stores/redis/lua/samples.lua",
        "redis.call('ZADD', 'tinsmith:samplers_used', now, sampler)\n",
        "",
        f"{_ADAPTERS}::test_what_was_used_within_the_time_stays",
    ),
    Mutant(
        "adapters: no request for one that was given up",
        "app/stores/redis/lua/samples.lua",
        "  if found[3] and not newest then return nil end\n",
        "",
        f"{_ADAPTERS}::test_a_client_of_an_adapter_that_was_given_up_learns_what_to_do",
    ),
    Mutant(
        "adapters: the newest in-flight weights",
        _TASK,
        " if adapter.sampler.prefix != newest]",
        "]",
        f"{_ADAPTERS}::test_the_newest_in_flight_weights_stay_however_many_others_were_saved",
    ),
    Mutant(
        "adapters: requests of other sessions on in-flight weights",
        _TASK,
        " if adapter.sampler.prefix not in in_use]",
        "]",
        f"{_ADAPTERS}::test_in_flight_weights_stay_while_another_clients_request_runs_on_them",
    ),
    Mutant(
        "orphans: files that a call uses again",
        "workers/maintenance/orphans.py",
        "                if may_remove:\n",
        "                if True:\n",
        f"{_ORPHANS}::test_files_that_a_call_uses_again_since_the_records_were_read_stay",
    ),
    Mutant(
        "orphans: files that are being removed are not used",
        f"{_LUA}/lifecycle.lua",
        "redis.call('ZADD', 'tinsmith:orphans', 0, ARGV[1])\n",
        "",
        f"{_ORPHANS}::test_files_are_used_again_after_their_removal_and_not_during_it",
    ),
    Mutant(
        "copies: an attempt that broke off leaves its files to the repeat",
        "app/services/checkpoints.py",
        "            self.lifecycle.use_files(str(_place(target)))\n",
        "",
        f"{_COPIES}::test_a_copy_that_broke_off_and_is_repeated_a_day_later_keeps_its_files_from_the_sweep",
    ),
    Mutant(
        "imports: files that are being removed",
        "app/services/imports/importer.py",
        "        self.lifecycle.use_files(str(place))\n",
        "",
        f"{_ORPHANS}::test_an_import_that_broke_off_is_not_completed_while_its_files_are_being_removed",
    ),
    Mutant(
        "orphans: an ended run that still has files",
        "workers/maintenance/orphans.py",
        " and model_id not in stored",
        "",
        f"{_ORPHANS}::test_an_ended_run_is_forgotten_once_its_session_its_checkpoints_and_their_files_are_gone",
    ),
    Mutant(
        "orphans: a run that has not ended",
        "workers/maintenance/orphans.py",
        "in fields and model_id not",
        "in fields or model_id not",
        f"{_ORPHANS}::test_a_run_that_has_not_ended_or_whose_session_lives_is_kept_without_files",
    ),
    Mutant(
        "orphans: an ended run of a session that is there",
        "workers/maintenance/orphans.py",
        " and not self._is_known(model_id):",
        ":",
        f"{_ORPHANS}::test_a_run_that_has_not_ended_or_whose_session_lives_is_kept_without_files",
    ),
    Mutant(
        "adapters: the files of a round that broke off",
        "workers/maintenance/orphans.py",
        ' if "given_up" not in fields)',
        ")",
        f"{_ADAPTERS}::test_the_files_of_a_round_that_broke_off_are_orphans",
    ),
    # Snapshots and the journal behind them.
    Mutant(
        "set_snapshot: only the newest epoch",
        f"{_LUA}/journal.lua",
        "head[1] ~= ARGV[2] or tonumber(ARGV[3])",
        "tonumber(ARGV[3])",
        f"{_OPLOG}::test_a_replaced_owner_sets_no_snapshot",
    ),
    Mutant(
        "set_snapshot: never back",
        f"{_LUA}/journal.lua",
        "tonumber(ARGV[3]) <= tonumber(head[2]) or ",
        "",
        f"{_OPLOG}::test_a_snapshot_trims_the_journal_behind_it_and_only_moves_forward",
    ),
    Mutant(
        "set_snapshot: never ahead of what was applied",
        f"{_LUA}/journal.lua",
        " or tonumber(ARGV[3]) > tonumber(head[4])",
        "",
        f"{_OPLOG}::test_a_snapshot_trims_the_journal_behind_it_and_only_moves_forward",
    ),
    Mutant(
        "set_snapshot: trim only behind it",
        f"{_LUA}/journal.lua",
        "redis.call('ZREMRANGEBYSCORE', journal, '-inf', seqs[#seqs])",
        "redis.call('DEL', journal)",
        f"{_JOURNAL}::test_what_is_behind_a_snapshot_is_trimmed_and_the_rest_stays",
    ),
    Mutant(
        "commit: keep what a replay runs",
        f"{_LUA}/journal.lua",
        "if ARGV[4] == 'failed' or kind == 'forward' or kind == 'save_weights' then",
        "if true then",
        f"{_JOURNAL}::test_what_a_replay_runs_is_kept_until_then",
    ),
    Mutant(
        "replay: what failed has no effect",
        "workers/train/executor.py",
        "        elif entry.doomed:\n            self.give_up(lease, entry)\n",
        "",
        f"{_RECOVERY}::test_what_failed_has_no_effect_in_a_replay_either",
    ),
    # Saves beside the next Ops.
    Mutant(
        "saves: commits wait behind the save",
        "workers/train/owner.py",
        "return bool(self.uncommitted) and self.uncommitted[0].op_result.done()",
        "return any(pending.op_result.done() for pending in self.uncommitted)",
        f"{_AHEAD}::test_the_next_ops_run_while_a_save_is_written_and_are_committed_behind_it",
        slow=True,
    ),
    Mutant(
        "saves: nothing runs ahead behind a failure",
        "workers/train/scheduler.py",
        "            and not resident.uncommitted[-1].failure\n",
        "",
        f"{_AHEAD}::test_what_fails_ahead_dooms_what_waits_as_it_would_have",
    ),
    Mutant(
        "saves: what broke a worker never runs ahead",
        "workers/train/scheduler.py",
        "            head.fresh\n            and ",
        "            ",
        f"{_AHEAD}::test_what_broke_a_worker_never_runs_ahead",
    ),
    Mutant(
        "saves: no snapshot of a state that ran ahead",
        "workers/checkpoints/snapshots.py",
        "elif not resident.uncommitted and self._is_due(",
        "elif self._is_due(",
        f"{_AHEAD}::test_no_snapshot_is_taken_of_a_state_that_ran_ahead_of_its_commits",
    ),
    Mutant(
        "saves: a state ahead of a save that was put off goes",
        "workers/train/committer.py",
        "if len(resident.uncommitted) > 1:",
        "if False:",
        f"{_SAVES}::test_a_store_that_is_away_costs_what_ran_ahead_no_attempt_and_no_bit",
    ),
    Mutant(
        "saves: what had begun is left at no attempt",
        "workers/train/owner.py",
        "self.put_off(resident.lease, pending.entry.seq)",
        "pass",
        f"{_SAVES}::test_a_model_that_is_released_leaves_nothing_undone_and_no_attempt",
    ),
    # Checkpoints.
    Mutant(
        "checkpoints: the manifest comes last",
        "workers/checkpoints/transfer.py",
        "    for name, entry in manifest.files.items():\n        _upload(",
        "    store.put_new(f'{prefix}/{MANIFEST}', manifest.to_json())\n"
        "    for name, entry in manifest.files.items():\n        _upload(",
        f"{_CHECKPOINTS}::test_a_write_that_ends_at_any_call_leaves_no_checkpoint_or_a_whole_one_and_can_be_repeated",
    ),
    Mutant(
        "checkpoints: a committed one is not written again",
        "workers/checkpoints/transfer.py",
        "    try:\n        return read_manifest(store, prefix)\n    except NotFound:\n        pass\n",
        "",
        f"{_CHECKPOINTS}::test_a_checkpoint_stays_what_it_was_whoever_writes_it_again",
    ),
    Mutant(
        "checkpoints: what is removed loses its manifest first",
        "app/stores/objects/notes.py",
        "not key.endswith",
        "key.endswith",
        f"{_CHECKPOINTS}::test_a_removal_that_dies_in_the_middle_leaves_no_half_checkpoint",
    ),
    Mutant(
        "folder store: create only",
        "app/stores/objects/folder.py",
        "os.link(temporary, target)",
        "temporary.replace(target)",
        "--confcutdir=tests/unit/app/stores tests/unit/app/stores/objects/test_folder.py",
    ),
    Mutant(
        "downloads: sha256",
        "workers/checkpoints/transfer.py",
        "        if found == expected:\n",
        "        if found.size == expected.size:\n",
        f"{_CHECKPOINTS}::test_a_damaged_checkpoint_is_never_returned",
    ),
    # Shared-memory transfers.
    Mutant(
        "set_snapshot: what was transferred may have to be made again",
        f"{_LUA}/journal.lua",
        "<= tonumber(ARGV[3]) then return 0 end",
        "< 0 then return 0 end",
        f"{_TRANSFER}::test_the_journal_reaches_back_before_what_is_not_uploaded_yet",
    ),
    Mutant(
        "admit_sample: a follower's version is the newest",
        f"{_LUA}/samples.lua",
        "cjson.decode(newest or found[1] or",
        "cjson.decode(found[1] or",
        f"{_TRANSFER}::test_in_flight_samplers_of_a_model_follow_its_newest_save_and_a_snapshot_stays",
    ),
    Mutant(
        "restore: behind a lost transfer no snapshot is of use",
        "workers/checkpoints/snapshots.py",
        "if local.seq >= before:",
        "if False:",
        f"{_TRANSFER}::test_a_local_snapshot_behind_a_lost_transfer_is_not_used",
        slow=True,
    ),
    Mutant(
        "complete: what is there of a generation stays",
        "workers/checkpoints/transfer.py",
        "own if store.put_new(key, source) else store.entry(key)",
        "own if store.put_new(key, source) else own",
        f"{_TRANSFER}::test_two_owners_that_upload_at_once_agree_on_one_of_their_copies",
    ),
    Mutant(
        "complete: the upload computes the sha256",
        "workers/checkpoints/transfer.py",
        "own = file_entry(source)",
        "own = manifest.files[name]",
        f"{_TRANSFER}::test_weights_are_sampled_on_their_machine_before_the_object_store_has_them",
    ),
    Mutant(
        "shared memory: files that a sampler reads in place stay",
        "workers/checkpoints/shm_transfer.py",
        "self._locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "self._locked(folder, fcntl.LOCK_SH)",
        "tests/unit/workers/sample/test_adapters.py::test_all_weights_of_a_model_are_read_where_the_trainer_wrote_them",
    ),
    Mutant(
        "shared memory: a part of it is left to others",
        "app/stack/memory.py",
        "min(most, total - min(max(total // 2, least), LEFT_TO_OTHERS))",
        "most",
        "tests/unit/workers/checkpoints/test_shm_folder.py::test_half_of_a_small_file_system_is_left_to_others",
    ),
    Mutant(
        "shared memory: a slow writer's folder is no leftover",
        "workers/checkpoints/shm_transfer.py",
        "self._locked(Path(temporary), fcntl.LOCK_EX)",
        "self._locked(Path(temporary), fcntl.LOCK_UN)",
        "tests/unit/workers/checkpoints/test_shm_folder.py"
        "::test_what_is_being_written_for_long_is_not_taken_for_a_leftover",
    ),
    Mutant(
        "adapter scheduler: newcomers come before more of the same",
        "workers/sample/adapters.py",
        "if adapter_id not in self._running and len(self._running) >= self._most:\n                return",
        "if adapter_id not in self._running and len(self._running) >= self._most:\n                continue",
        "tests/unit/workers/sample/test_adapter_scheduler.py::test_an_adapter_that_is_in_does_not_keep_the_others_out_for_ever",
        slow=True,
    ),
    # Uploads and imports.
    Mutant(
        "uploads: files are listed before uploads",
        "workers/maintenance/orphans.py",
        """keys = self._objects.list(f"{UPLOADS}/")
        waiting = set(self._waiting_uploads())""",
        """waiting = set(self._waiting_uploads())
        keys = self._objects.list(f"{UPLOADS}/")""",
        f"{_ORPHANS}::test_files_of_an_upload_that_starts_just_before_files_are_listed_stay",
    ),
    Mutant(
        "uploads: unfinished ones expire",
        "workers/maintenance/orphans.py",
        "expired = upload.is_expired(now)",
        "expired = False",
        f"{_ORPHANS}::test_an_upload_goes_with_its_files_when_it_expires_and_not_before",
    ),
    Mutant(
        "objects: a foreign file is no object",
        "app/stores/objects/folder.py",
        " and is_key(key))",
        ")",
        f"{_ORPHANS}::test_a_file_of_the_disk_among_the_files_of_an_orphan_does_not_keep_them",
    ),
    Mutant(
        "orphans: one that cannot be removed",
        "workers/maintenance/orphans.py",
        "except Unavailable as error:",
        "except NewerContent as error:",
        f"{_ORPHANS}::test_an_orphan_that_cannot_be_removed_keeps_no_other",
    ),
    Mutant(
        "folder store: a disk without hard links",
        "app/stores/objects/folder.py",
        "self._check_links(temporary)",
        "pass",
        f"{_FOLDER}::test_a_disk_without_hard_links_is_refused_at_the_start",
    ),
    Mutant(
        "copies: files of a source that was overwritten",
        "app/services/checkpoints.py",
        "self._check_not_overwritten(model_id, source)",
        "pass",
        f"{_COPIES}::test_a_copy_that_broke_off_has_no_file_of_a_source_that_was_overwritten_since",
    ),
    Mutant(
        "copies: the only seq counts as committed",
        "app/services/checkpoints.py",
        '"applied": str(_SEQ)',
        '"applied": "0"',
        f"{_COPIES}::test_a_copy_that_broke_off_has_no_file_of_a_source_that_was_overwritten_since",
    ),
    Mutant(
        "rebuild: times of two clocks",
        "app/services/recovery/rebuild.py",
        "self._saved(stored.prefix)",
        "stored.created",
        "tests/unit/app/services/recovery/test_rebuild.py::test_the_later_save_counts_whatever_the_difference_between_a_workers_"
        "clock_and_the_state_servers",
    ),
    Mutant(
        "delete: files that a journal loads",
        "app/services/checkpoints.py",
        "keep_files=is_loaded",
        "keep_files=False",
        "tests/unit/app/api/test_deletion.py"
        "::test_files_that_a_run_loads_outlive_their_checkpoint_as_long_as_it_may_be_replayed",
    ),
    Mutant(
        "delete: no load is admitted once the journals were looked through",
        "app/services/checkpoints.py",
        '        self._update(path, checkpoint, {"deleting": checkpoint.prefix})\n',
        "",
        "tests/unit/app/api/test_deletion.py::test_a_deletion_that_looks_for_loads_admits_no_further_one",
    ),
    Mutant(
        "delete: a load of a checkpoint that is not there any more",
        f"{_LUA}/journal.lua",
        "return found[1] ~= prefix or found[2] == prefix",
        "return found[2] == prefix",
        "tests/unit/app/api/test_deletion.py::test_a_load_finds_its_checkpoint_deleted_or_overwritten_since_it_was_read",
    ),
    Mutant(
        "delete: overwritten saves of a deleted checkpoint",
        "app/stores/objects/notes.py",
        "    expire_older(store, prefix, now)\n",
        "",
        "tests/unit/app/api/test_deletion.py"
        "::test_no_overwritten_save_of_a_deleted_checkpoint_comes_back_into_an_emptied_state_server",
    ),
    Mutant(
        "delete: a bounded number of notes",
        "app/stores/objects/notes.py",
        "[:_MOST_EXPIRED]",
        "",
        "tests/unit/app/api/test_deletion.py::test_a_deletion_stores_a_bounded_number_of_notes",
    ),
    Mutant(
        "delete: a disk without room for a note",
        "app/stores/objects/notes.py",
        "except Unavailable as error:",
        "except ZeroDivisionError as error:",
        "tests/unit/app/api/test_deletion.py::test_a_deletion_on_a_full_disk_frees_the_checkpoints_files",
    ),
    Mutant(
        "imports: files of an attempt that broke off are orphans",
        "app/services/imports/importer.py",
        'head = {"applied": str(place.seq),',
        'head = {"applied": "0",',
        f"{_ORPHANS}::test_files_of_an_import_that_broke_off_go",
    ),
    Mutant(
        "uploads: the signature covers the size",
        "app/stores/objects/folder.py",
        """return f"uploads/{most_bytes}/{key}\"""",
        """return f"uploads/{2**20}/{key}\"""",
        f"{_UPLOADS}::test_a_forged_url_stores_nothing[size]",
    ),
    Mutant(
        "imports: one content for ever",
        "app/services/imports/importer.py",
        'if made.get("applied") != str(place.seq):',
        "if False:",
        f"{_UPLOAD_STORAGE}::test_an_import_has_one_content_and_a_rebuild_ends_with_it",
    ),
    Mutant(
        "uploads: a larger file of an S3 URL",
        "app/stores/objects/base.py",
        "            if left < 0:",
        "            if False:",
        f"{_UPLOAD_STORAGE}::test_a_larger_file_that_an_s3_url_took_is_refused",
    ),
    Mutant(
        "uploads: some finishes at once",
        "app/services/imports/uploads.py",
        "if not self.finishes.acquire(blocking=False):",
        "if False:",
        f"{_UPLOAD_STORAGE}::test_only_some_finishes_run_at_once",
    ),
    Mutant(
        "uploads: no encoding is undone",
        "app/stores/objects/s3.py",
        "answer.stream(2**20, decode_content=False)",
        "answer.stream(2**20)",
        "tests/conformance/test_s3_store.py::test_an_object_that_was_sent_with_an_encoding_comes_as_it_is_stored",
    ),
    Mutant(
        "S3: an upload has a checksum",
        "app/stores/objects/s3.py",
        ', "Content-MD5": checksum}',
        "}",
        "tests/conformance/test_s3_store.py::test_a_connection_that_breaks_off_before_the_body_leaves_no_object",
    ),
    Mutant(
        "uploads: a finish that was overtaken",
        "app/services/imports/uploads.py",
        "except (BadRequest, LimitReached):",
        "except BadRequest:",
        f"{_UPLOAD_STORAGE}::test_a_finish_that_another_one_overtakes_needs_no_room_of_its_own",
    ),
    Mutant(
        "imports: a name that is repeated",
        "app/services/imports/safetensors.py",
        "if len(found) < len(pairs):",
        "if False:",
        "--confcutdir=tests/unit/app/services/imports tests/unit/app/services/imports/test_safetensors.py",
    ),
    Mutant(
        "imports: tensors fill their file",
        "app/services/imports/safetensors.py",
        "if entry.start != end:",
        "if False:",
        "--confcutdir=tests/unit/app/services/imports tests/unit/app/services/imports/test_safetensors.py",
    ),
    Mutant(
        "imports: an adapter covers whole groups",
        "app/services/imports/peft_files.py",
        "if missing := sorted(wanted.keys() - found.keys()):",
        "if missing := []:",
        "tests/unit/app/services/imports/test_peft_files.py",
    ),
    Mutant(
        "imports: a configuration that computes something else",
        "workers/models/full_weights.py",
        "if stored.get(name) != own.get(name):",
        "if False:",
        "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_full_weights.py",
    ),
    Mutant(
        "imports: a buffer that computes something else",
        "workers/models/full_weights.py",
        'if not torch.equal(found.to(dtype), own[name].to("cpu", dtype)):',
        "if False:",
        "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_full_weights.py",
    ),
    Mutant(
        "imports: vLLM reads the model's own tensors alone",
        "workers/models/full_weights.py",
        "if wanted is None or name in wanted:",
        "if True:",
        "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_full_weights.py",
    ),
    Mutant(
        "imports: a tensor of another shape is refused",
        "workers/models/full_weights.py",
        "if shape != self._known[name]:",
        "if False:",
        "--confcutdir=tests/unit/workers/models tests/unit/workers/models/test_full_weights.py",
    ),
    Mutant(
        "imports: all weights are there",
        "app/services/imports/full_weights.py",
        'if found.get(name) != wanted and (name in found or ".experts." not in name):',
        "if False:",
        "tests/unit/app/services/imports/test_full_weights.py",
    ),
)
