"""Guards of a state server behind sentinels, whose primary may change."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
_DURABILITY = "app/stores/redis/durability.py"
_SENTINEL = "app/stores/redis/sentinel.py"
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_URLS, _PROMOTION = f"{_STORES}/test_sentinel.py", f"{_STORES}/test_promotion.py"
_REPLICAS = f"{_STORES}/test_replicas.py"
_RELIES = f"{_REPLICAS}::test_what_a_client_or_the_object_store_relies_on_waits_for_a_replica"
_FENCED = f"{_PROMOTION}::test_an_owner_before_the_promotion_can_neither_begin_nor_commit_anything"
_EPOCHS = f"{_PROMOTION}::test_an_epoch_of_the_lost_history_is_never_given_out_again_and_its_snapshots_are_not_used"

MUTANTS = (
    Mutant(
        "sentinels: asked by one thread at a time",
        _SENTINEL,
        "        with self._lock:\n",
        "        if True:\n",
        f"{_URLS}::test_the_sentinels_are_asked_one_thread_at_a_time",
    ),
    Mutant(
        "sentinels: TLS for them too",
        _SENTINEL,
        "{**of_servers, **tls}, {**of_sentinels, **tls}",
        "{**of_servers, **tls}, of_sentinels",
        f"{_URLS}::test_with_tls_neither_sentinels_nor_servers_are_spoken_to_in_plain_text",
    ),
    Mutant(
        "sentinels: TLS for the servers too",
        _SENTINEL,
        "{**of_servers, **tls}, {**of_sentinels, **tls}",
        "of_servers, {**of_sentinels, **tls}",
        f"{_URLS}::test_with_tls_neither_sentinels_nor_servers_are_spoken_to_in_plain_text",
    ),
    Mutant(
        "sentinels: they do not watch the broker",
        "app/settings/server.py",
        "if url.startswith(SENTINEL_SCHEMES):",
        "if False:",
        f"{_URLS}::test_the_broker_is_a_server_of_its_own",
    ),
    Mutant(
        "history: a new primary begins one",
        f"{_LUA}/leases.lua",
        "if found[1] == ARGV[1] then return 0 end",
        "if found[1] then return 0 end",
        _FENCED,
    ),
    Mutant(
        "history: the same primary begins none",
        f"{_LUA}/leases.lua",
        "if found[1] == ARGV[1] then return 0 end",
        "",
        f"{_PROMOTION}::test_the_same_primary_fences_nobody_when_connections_are_made_again",
    ),
    Mutant(
        "history: a clock that is behind",
        f"{_LUA}/leases.lua",
        "if number <= former then number = former + FAR end",
        "",
        f"{_PROMOTION}::test_a_primary_whose_clock_is_behind_gives_out_no_epoch_again",
    ),
    Mutant(
        "history: cursors of the lost end",
        f"{_LUA}/leases.lua",
        "redis.call('INCRBY', 'tinsmith:completions', FAR)",
        "",
        f"{_PROMOTION}::test_a_client_that_polls_for_all_its_samples_is_told_of_those_after_the_promotion",
    ),
    Mutant(
        "history: epochs of the lost end",
        f"{_LUA}/leases.lua",
        "number - (redis.call('HGET', key, 'history') or 0))",
        "1)",
        _EPOCHS,
    ),
    Mutant(
        "history: snapshots of the lost end",
        f"{_LUA}/leases.lua",
        "'history', number, 'epoch_floor', epoch, 'worker'",
        "'history', number, 'worker'",
        _EPOCHS,
    ),
    Mutant(
        "history: an owner of a former one holds nobody up",
        f"{_LUA}/leases.lua",
        "if held and current and",
        "if held and",
        f"{_PROMOTION}::test_no_owner_has_to_wait_for_one_before_the_promotion",
    ),
    Mutant(
        "history: next",
        f"{_LUA}/leases.lua",
        "'epoch') ~= ARGV[2] or not is_current(model) then return 0 end\nlocal op",
        "'epoch') ~= ARGV[2] then return 0 end\nlocal op",
        _FENCED,
    ),
    Mutant(
        "history: begin_restore",
        f"{_LUA}/leases.lua",
        " or not is_current(ARGV[1]) then return 0 end\nlocal key = 'tinsmith:restore:'",
        " then return 0 end\nlocal key = 'tinsmith:restore:'",
        _FENCED,
    ),
    Mutant(
        "history: renew",
        f"{_LUA}/leases.lua",
        " and not is_past then",
        " then",
        _FENCED,
    ),
    Mutant(
        "history: renew lets samples run on",
        f"{_LUA}/leases.lua",
        "redis.call('EXISTS', 'tinsmith:models:' .. ARGV[i]) == 1 and not is_current",
        "not is_current",
        f"{_PROMOTION}::test_a_request_that_runs_on_a_sampler_keeps_its_lease",
    ),
    Mutant(
        "history: commit",
        f"{_LUA}/journal.lua",
        "== seq - 1 and is_current(model)",
        "== seq - 1",
        _FENCED,
    ),
    Mutant(
        "history: set_snapshot",
        f"{_LUA}/journal.lua",
        "if not is_current(ARGV[1]) then return false end",
        "",
        _FENCED,
    ),
    Mutant(
        "replicas: a call waits for them",
        _DURABILITY,
        "reached < replicas:",
        "False:",
        f"{_REPLICAS}::test_a_call_is_acknowledged_when_a_replica_has_it",
    ),
    Mutant(
        "replicas: a mark in front of each WAIT",
        _DURABILITY,
        '("EVAL", scripts.alone("mark"), 0)',
        '("PING",)',
        f"{_REPLICAS}::test_a_repeat_is_no_acknowledgement_either",
    ),
    Mutant(
        "replicas: the mark of a full server",
        f"{_LUA}/records.lua",
        "-- script: mark flags=allow-oom",
        "-- script: mark",
        f"{_REPLICAS}::test_results_are_readable_when_the_state_server_is_full",
    ),
    Mutant(
        "replicas: a result waits for them",
        "app/stores/redis/futures.py",
        'self._run.confirmed("HGETALL", keys.future(request_id))',
        "read_hash(self._redis, keys.future(request_id))",
        f"{_REPLICAS}::test_a_result_is_readable_when_a_replica_has_it",
    ),
    Mutant(
        "replicas: a call that was looked up waits for them",
        "app/stores/redis/futures.py",
        'self._run.confirmed("HGET", keys.future(request_id), "digest")',
        'self._redis.hget(keys.future(request_id), "digest")',
        f"{_REPLICAS}::test_a_repeat_is_no_acknowledgement_either",
    ),
    Mutant(
        "replicas: scripts that the server forgot",
        "app/stores/redis/client.py",
        "\n        except redis.exceptions.NoScriptError:\n",
        "\n        except redis.exceptions.NoPermissionError:\n",
        f"{_REPLICAS}::test_a_server_that_forgot_the_scripts_is_sent_them_again",
    ),
    Mutant(
        "replicas: a worker that starts or stops insists on none",
        "workers/process/liveness.py",
        "        with suppress(NotReplicated):\n",
        "        if True:\n",
        "tests/unit/workers/process/test_heartbeat.py::test_an_orderly_stop_closes_the_worker_while_a_replica_is_away",
        slow=True,
    ),
    Mutant(
        "replicas: a snapshot waits for them",
        _DURABILITY,
        '"set_snapshot", ',
        "",
        f"{_REPLICAS}::test_a_snapshot_replaces_the_one_before_it_when_a_replica_knows_it",
    ),
    Mutant(
        "replicas: refusals wait for them",
        _DURABILITY,
        '"refuse", ',
        "",
        f"{_RELIES}[refuse]",
    ),
    Mutant(
        "replicas: a call that they lack is dispatched",
        "app/services/admission.py",
        "        announce(error.admission)\n",
        "",
        "tests/unit/app/services/test_admission.py"
        "::test_a_call_without_a_replica_is_dispatched_once_although_its_answer_is_a_503",
    ),
)
