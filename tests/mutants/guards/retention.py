"""Guards of what a project keeps: the TTL of its checkpoints, and the newest ones of each run."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_RETENTION = "tests/unit/workers/maintenance/test_retention.py"
_TASK = "workers/maintenance/retention.py"
_RECORDS = "app/domain/records.py"
_LIFECYCLE = "app/stores/redis/lua/lifecycle.lua"
_ADAPTERS = "tests/unit/workers/maintenance/test_adapters.py"
_OPENAI = "tests/unit/workers/maintenance/test_openai_samplers.py"
_STAYS = f"{_RETENTION}::test_published_ones_and_those_with_a_ttl_of_their_own_stay_and_do_not_count"
_PROJECTS_TTL = (
    "tests/unit/workers/checkpoints/test_rebuild.py"
    "::test_a_save_without_a_ttl_has_that_of_its_project_and_a_rebuild_knows_whose_it_is"
)

MUTANTS = (
    Mutant(
        "retention: a checkpoint that changed since it was read",
        "app/stores/redis/lua/records.lua",
        "      if (found[i] or '') ~= was then return 0 end\n",
        "",
        f"{_RETENTION}::test_nothing_that_must_stay_is_ever_deleted",
    ),
    Mutant(
        "retention: a newer one that was published since it was read",
        "app/stores/redis/records.py",
        "kept = [[path, _retained(fields)] for path, fields in newer]",
        "kept: list[object] = []",
        f"{_RETENTION}::test_nothing_that_must_stay_is_ever_deleted",
    ),
    Mutant("retention: published ones", _RECORDS, "return not self.public and self", "return self", _STAYS),
    Mutant("retention: what its owner keeps for ever", _RECORDS, " and self.expiry_by != OWNER", "", _STAYS),
    Mutant(
        "retention: a TTL of its own",
        _RECORDS,
        " and (self.expires_at is None or self.expiry_by == PROJECT)",
        "",
        _STAYS,
    ),
    Mutant(
        "retention: a change of what is deleted meanwhile",
        "app/services/checkpoints.py",
        'if not self._update(path, checkpoint, {"public": public}):',
        'if not self._update(path, checkpoint, {"public": public}) and False:',
        "tests/unit/app/api/test_weights.py::test_a_change_of_a_checkpoint_that_is_deleted_meanwhile_finds_none",
    ),
    Mutant(
        "retention: a change of what is overwritten meanwhile",
        "app/stores/redis/lua/records.lua",
        "if redis.call('HGET', key, ARGV[3]) ~= ARGV[4] then return 0 end",
        "if redis.call('EXISTS', key) == 0 then return 0 end",
        "tests/unit/app/api/test_weights.py::"
        "test_a_change_of_a_checkpoint_that_is_overwritten_meanwhile_is_made_to_the_new_save_and_outlives_a_rebuild",
    ),
    Mutant("retention: expired ones do not count", _TASK, " and not checkpoint.is_expired(now)", "", _STAYS),
    Mutant(
        "retention: the order of the saves",
        _TASK,
        "one[:2]",
        "one[2][0]",
        f"{_RETENTION}::test_a_run_keeps_the_newest_of_each_kind_in_the_order_of_their_saves",
    ),
    Mutant(
        "retention: a save's own TTL",
        "app/domain/checkpoints.py",
        "if ttl_s is not None:",
        "if ttl_s is not None and project_ttl_s is None:",
        _PROJECTS_TTL,
    ),
    Mutant(
        "retention: an owner's choice after a rebuild",
        "app/services/recovery/rebuild.py",
        'OWNER if has_note(keys, "expires_at") else written.expiry_by',
        "written.expiry_by",
        _PROJECTS_TTL,
    ),
    Mutant(
        "retention: an owner's choice",
        "app/services/checkpoints.py",
        '"expiry_by": OWNER}',
        '"expiry_by": ""}',
        "tests/unit/app/api/test_weights.py::test_a_ttl_is_set_counted_from_now_and_removed",
    ),
    # Samplers of OpenAI-compatible calls.
    Mutant(
        "deleted adapters: an in-flight client stays",
        "workers/maintenance/adapters.py",
        'elif not sampler.follows and "given_up" in fields and',
        'elif "given_up" in fields and',
        f"{_ADAPTERS}::test_the_sampling_session_of_a_deleted_adapter_stays_while_it_is_used[inflight]",
    ),
    Mutant(
        "deleted adapters: late requests get the reason for two days",
        "workers/maintenance/adapters.py",
        ' and int(fields["given_up"]) < before:',
        ":",
        f"{_ADAPTERS}::test_two_days_after_its_adapter_a_sampling_session_is_removed_and_leaves_nothing",
    ),
    Mutant(
        "deleted adapters: routes can be used while they are stored",
        "workers/maintenance/adapters.py",
        "max(settings.result_unread_s, LONGEST_S)",
        "settings.result_unread_s",
        f"{_ADAPTERS}::test_routes_of_a_deleted_adapter_can_be_used_while_they_are_stored",
    ),
    Mutant(
        "unused samplers: one that runs a sample",
        _LIFECYCLE,
        "\n     and redis.call('EXISTS', 'tinsmith:sampled:' .. id) == 0 then\n    end_sampler(",
        " then\n    end_sampler(",
        f"{_OPENAI}::test_a_running_sample_keeps_its_sampler_until_it_ends",
    ),
    Mutant(
        "unused samplers: one that was used, or is about to be",
        _LIFECYCLE,
        "if created and created * 1000 < before and not redis.call('ZSCORE', 'tinsmith:samplers_used', id)",
        "if created and created * 1000 < before",
        f"{_OPENAI}::test_what_was_made_or_used_within_the_time_stays",
    ),
    Mutant(
        "unused samplers: those that only the SDK makes",
        "workers/maintenance/adapters.py",
        "return bool(sampler.prefix) and sampler_id == made",
        "return bool(sampler.prefix)",
        f"{_OPENAI}::test_samplers_of_base_models_and_of_the_sdk_stay",
    ),
    # A clock that jumps.
    Mutant(
        "while steady: a clock that jumped",
        "workers/maintenance/leader.py",
        "if self._oplog.calls_taken_s() >= self._session_s:",
        "if True:",
        "tests/unit/workers/maintenance/test_clock_jumps.py",
    ),
    Mutant(
        "audit: a deletion that is repeated",
        "app/services/checkpoints.py",
        '"checkpoint_delete", about, once=once, urgent=True',
        '"checkpoint_delete", about, urgent=True',
        "tests/unit/app/api/test_deletion.py"
        "::test_a_deletion_that_the_object_store_broke_off_is_ended_by_a_repeat_and_no_rebuild_restores_it",
    ),
)
