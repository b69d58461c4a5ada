"""Guards of calls, their order and their owners, on the state server."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_OPLOG = f"{_STORES}/test_journal.py"
_JOURNAL = "tests/property/test_journal.py"
_CODEC, _NEWER = "tests/unit/app/domain/test_ops.py", "tests/unit/workers/train/test_newer_versions.py"
_RECOVERY = "tests/property/test_recovery.py"
_SHARED = "tests/unit/workers/train/test_shared_steps.py"

MUTANTS = (
    # Admission: a call is identified by model, seq and content.
    Mutant(
        "dedupe: other content under a used seq",
        f"{_LUA}/journal.lua",
        "known[1] == digest and 'repeat' or 'conflict'",
        "'repeat'",
        f"{_OPLOG}::test_other_content_under_a_used_seq_is_a_400_and_changes_nothing",
    ),
    Mutant(
        "consumed: a seq whose future has expired",
        f"{_LUA}/journal.lua",
        "if seq <= applied then return {'consumed', ''} end",
        "",
        f"{_OPLOG}::test_a_seq_whose_future_has_expired_is_not_run_again",
    ),
    Mutant(
        "refused: a seq that was refused or given up",
        f"{_LUA}/journal.lua",
        "if known[2] then return {'refused', known[2]} end",
        "",
        f"{_OPLOG}::test_a_lost_batch_is_consumed_and_dooms_only_what_waited_up_to_the_next_optim_step",
    ),
    Mutant(
        "refuse: a seq that is taken",
        f"{_LUA}/journal.lua",
        "if redis.call('EXISTS', 'tinsmith:op:' .. request) == 1 then return 0 end",
        "",
        f"{_JOURNAL}::test_a_seq_that_is_taken_can_not_be_refused",
    ),
    # Stored forms: what an older version wrote, and what a newer one may write.
    Mutant(
        "codec: a field that was added has its default",
        "app/domain/ops.py",
        "while len(parts) > least and",
        "while False and",
        f"{_CODEC}::test_added_fields_that_have_their_defaults_leave_the_bytes_and_so_the_digest_as_they_were",
    ),
    Mutant(
        "codec: more fields than are known here",
        "app/domain/ops.py",
        "if len(items) - 1 > len(fields(known)):",
        "if False:",
        f"{_CODEC}::test_what_only_a_newer_version_can_have_written_is_known_as_that",
    ),
    Mutant(
        "newer: the model is released",
        "workers/train/runner.py",
        "        self._owner.evict(model_id)\n",
        "",
        f"{_NEWER}::test_a_newer_op_is_left_without_an_attempt_and_its_model_free_for_a_newer_worker",
    ),
    Mutant(
        "newer: no model is brought back for it",
        "workers/train/owner.py",
        "not entry.doomed and ops.is_newer(entry.payload)",
        "False",
        f"{_NEWER}::test_an_old_worker_does_not_bring_a_model_back_for_what_it_cannot_read",
    ),
    # Order and ownership.
    Mutant(
        "commit: only applied + 1",
        f"{_LUA}/journal.lua",
        " and tonumber(head[2]) == seq - 1",
        "",
        f"{_OPLOG}::test_a_commit_out_of_order_or_twice_is_fenced",
    ),
    Mutant(
        "commit: only the newest epoch",
        f"{_LUA}/journal.lua",
        "head[1] == ARGV[2] and tonumber(head[2]) ==",
        "tonumber(head[2]) ==",
        f"{_OPLOG}::test_a_restarted_node_replaces_its_earlier_process_and_fences_it",
    ),
    Mutant(
        "next: only the newest epoch",
        f"{_LUA}/leases.lua",
        "redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] or",
        "",
        f"{_OPLOG}::test_a_restarted_node_replaces_its_earlier_process_and_fences_it",
    ),
    Mutant(
        "acquire: one node at a time",
        f"{_LUA}/leases.lua",
        "if held and current and node_of(held) ~= node_of(ARGV[2]) then return {held} end",
        "",
        f"{_OPLOG}::test_one_node_owns_a_model_until_its_lease_ends",
    ),
    Mutant(
        "acquire: a new owner has a new epoch",
        f"{_LUA}/leases.lua",
        "redis.call('HINCRBY', key, 'epoch', 1)",
        "",
        f"{_OPLOG}::test_a_restarted_node_replaces_its_earlier_process_and_fences_it",
    ),
    Mutant(
        "release: only one's own lease",
        f"{_LUA}/leases.lua",
        "if redis.call('GET', key) == ARGV[2] then redis.call('DEL', key) end",
        "redis.call('DEL', key)",
        f"{_OPLOG}::test_one_node_owns_a_model_until_its_lease_ends",
    ),
    Mutant(
        "leases: without an answer for a lease time, all are lost",
        "workers/process/liveness.py",
        "time.monotonic() - self._renewed.get(id_, -math.inf) < self._lease_s",
        "id_ in self._renewed",
        "tests/property/test_leases.py",
        slow=True,
    ),
    # Lost gradients.
    Mutant(
        "doom: up to the next optim_step only",
        f"{_LUA}/journal.lua",
        "if redis.call('HGET', op, 'kind') == 'optim_step' then return end",
        "",
        f"{_OPLOG}::test_a_failed_forward_backward_dooms_what_waits_up_to_the_next_optim_step",
    ),
    Mutant(
        "doom: the first reason stays",
        f"{_LUA}/journal.lua",
        "redis.call('HSETNX', op, 'doomed', reason)",
        "redis.call('HSET', op, 'doomed', reason)",
        f"{_JOURNAL}::test_the_first_reason_an_op_fails_for_stays",
    ),
    Mutant(
        "commit: a failed forward_backward dooms what waits",
        f"{_LUA}/journal.lua",
        "    doom(model, seq, why)\n",
        "",
        f"{_OPLOG}::test_a_failed_forward_backward_dooms_what_waits_up_to_the_next_optim_step",
    ),
    Mutant(
        "window: no step without all its gradients",
        "workers/train/executor.py",
        "if entry.kind == OptimStep.kind and accumulation.missing:",
        "if False:",
        f"{_RECOVERY}::test_no_step_runs_behind_a_batch_that_failed_even_when_another_came",
    ),
    Mutant(
        "window: no step on part of its gradients beside other steps",
        "workers/train/executor.py",
        "failures = {lease.model_id: doom(entry, accumulation)",
        "failures = {lease.model_id: ''",
        f"{_SHARED}::test_a_step_without_all_of_its_gradients_is_refused_beside_others",
    ),
    Mutant(
        "window: a step that fails beside others drops its gradients",
        "workers/train/executor.py",
        "                self.give_up(lease, entry)\n",
        "",
        f"{_SHARED}::test_a_step_that_fails_beside_others_drops_its_gradients",
    ),
    Mutant(
        "window: nothing stands in for a batch that failed",
        "workers/train/executor.py",
        "replace(self, added=True) if self.beyond_repair else GradAccumulation(added=True)",
        "GradAccumulation(added=True)",
        f"{_RECOVERY}::test_no_step_runs_behind_a_batch_that_failed_even_when_another_came",
    ),
    Mutant(
        "window: a live run names the reasons of a replay",
        "workers/train/owner.py",
        "failure = pending.entry.doomed or pending.failure",
        "failure = pending.failure",
        f"{_RECOVERY}::test_a_step_without_its_gradients_names_the_same_reason_after_a_kill[False]",
    ),
    Mutant(
        "window: nothing stands in for a refused batch behind others",
        "workers/train/executor.py",
        "beyond_repair=self.beyond_repair or self.added",
        "beyond_repair=self.beyond_repair",
        f"{_RECOVERY}::test_a_refused_batch_may_be_sent_again_only_if_nothing_was_added_before_it",
    ),
)
