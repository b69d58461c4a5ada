"""Guards against servers, disks and connections that do not do what they must."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# Without the fixtures of the API's own tests, which take seconds to load.
_STORES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis"
_DURABILITY = f"{_STORES}/test_durability.py"
_SETTING = f"{_DURABILITY}::test_a_setting_with_which_calls_get_lost_is_refused_with_its_remedy"
_DEAD = "tests/faults/test_dead_connections.py"
_RESULTS = f"{_STORES}/test_large_results.py"
_SHORTAGE = f"{_STORES}/test_shortage.py"
_FOLDER = "--confcutdir=tests/unit/app/stores tests/unit/app/stores/objects/test_folder.py"
_QUEUES = "tests/unit/workers/maintenance/test_direct_queues.py"
_DATA = "tests/processes/app/stack/test_data_folder.py"
_NODE = "tests/unit/workers/process/test_node_name.py"
_STORE_ID = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/test_store_id.py"
_CONNECTION = "tests/unit/app/commands/test_connection.py"

MUTANTS = (
    # A stack, and not that of another folder.
    Mutant(
        "commands: a copied folder has the settings of another stack",
        "app/commands/connection.py",
        "    if not _is_at(settings, folder) and",
        "    if False and",
        f"{_CONNECTION}::test_a_copied_or_moved_folder_does_not_lead_to_the_stack_of_the_first",
    ),
    Mutant(
        "commands: a folder has many paths",
        "app/commands/connection.py",
        ".expanduser().resolve() == folder.expanduser().resolve()",
        " == folder",
        f"{_CONNECTION}::test_a_folder_has_many_paths",
    ),
    Mutant(
        "store id: another store is refused",
        "app/stores/store_id.py",
        "    if found != known:",
        "    if False:",
        f"{_STORE_ID}::test_another_or_an_empty_store_is_refused_and_stays_as_it_is",
    ),
    Mutant(
        "store id: the first process decides",
        "app/stores/store_id.py",
        "    return objects.read(STORE_ID).decode()",
        "    return uuid.uuid4().hex",
        f"{_STORE_ID}::test_both_keep_the_id_of_the_first_start",
    ),
    Mutant(
        "store id: an empty store has no checkpoints of an earlier version",
        "app/stores/store_id.py",
        "    return any(records.list(Checkpoint.namespace)) or",
        "    return",
        f"{_STORE_ID}::test_data_of_an_earlier_commit_gets_an_id_unless_its_checkpoints_are_not_there",
    ),
    Mutant(
        "store id: an outage is no wrong store",
        "app/stores/store_id.py",
        "    except (redis.RedisError, OSError, Unavailable, NotFound) as error:",
        "    except ValueError as error:",
        f"{_STORE_ID}::test_a_server_that_is_away_at_the_start_is_no_error",
    ),
    # A state server that keeps what it acknowledges.
    Mutant(
        "durability: each new connection asks",
        "app/stores/redis/client.py",
        "_client(url, redis_connect_func=check)",
        "_client(url)",
        f"{_DURABILITY}::test_a_server_that_came_back_with_other_settings_takes_no_call_until_they_are_right",
    ),
    Mutant(
        "durability: an append-only file",
        "app/stores/redis/durability.py",
        'if facts.get("aof_enabled") != "1":',
        "if False:",
        _SETTING,
    ),
    Mutant(
        "durability: on disk before the answer",
        "app/stores/redis/durability.py",
        'if appendfsync not in (None, "always"):',
        "if False:",
        _SETTING,
    ),
    Mutant(
        "durability: nothing is evicted",
        "app/stores/redis/durability.py",
        'if policy != "noeviction":',
        "if False:",
        _SETTING,
    ),
    Mutant(
        "durability: a bound of memory",
        "app/stores/redis/durability.py",
        'if facts.get("maxmemory", "0") == "0":',
        "if False:",
        _SETTING,
    ),
    Mutant(
        "durability: a primary",
        "app/stores/redis/durability.py",
        'mode != "standalone" or role != "master"',
        'mode != "standalone"',
        f"{_DURABILITY}::test_a_replica_is_refused",
    ),
    Mutant(
        "durability: no cluster",
        "app/stores/redis/durability.py",
        'mode != "standalone" or role != "master"',
        'role != "master"',
        f"{_DURABILITY}::test_a_cluster_is_refused",
    ),
    Mutant(
        "durability: a version that knows the scripts' flags",
        "app/stores/redis/durability.py",
        "_LEAST_VERSION = 7",
        "_LEAST_VERSION = 6",
        f"{_DURABILITY}::test_a_version_before_7_is_refused",
    ),
    Mutant(
        "durability: before an API starts",
        "app/services/container.py",
        "    check_at_start(client)\n",
        "",
        "tests/unit/app/api/test_outages.py::test_an_api_does_not_start_on_a_server_that_may_lose_calls",
    ),
    Mutant(
        "durability: before a worker starts",
        "workers/process/parts.py",
        "        check_at_start(client)\n",
        "",
        "tests/unit/workers/process/test_parts.py",
    ),
    Mutant(
        "durability: before a stack starts",
        "app/stack/checks.py",
        "_reach(url, connect_state)",
        "_reach(url, connect)",
        "tests/unit/app/stack/test_checks.py",
    ),
    Mutant(
        "S3: a server that honours If-None-Match",
        "app/stores/objects/s3.py",
        "if (found := self._write_twice()) != (200, 412):",
        "if (found := self._write_twice()) == ():",
        "tests/conformance/test_s3_store.py::test_a_server_that_ignores_if_none_match_is_refused_at_the_start",
    ),
    # Connections whose peer fell silent.
    Mutant(
        "connections: the state server's peer must acknowledge",
        "app/stores/redis/client.py",
        "        socket_keepalive_options=KEEPALIVE,\n",
        "",
        f"{_DEAD}::test_a_dead_connection_ends_before_its_answer_is_due",
        slow=True,
    ),
    Mutant(
        "connections: the state server must answer",
        "app/stores/redis/client.py",
        "socket_timeout=ANSWER_S",
        "socket_timeout=None",
        f"{_DEAD}::test_a_lease_never_lapses_when_the_connection_falls_silent[stopped]",
        slow=True,
    ),
    Mutant(
        "connections: a channel must answer",
        "app/stores/redis/client.py",
        "if silent_s > ANSWER_S:",
        "if False:",
        f"{_DEAD}::test_a_poll_whose_connection_fell_silent_is_woken_and_hears_later_results[stopped]",
        slow=True,
    ),
    Mutant(
        "connections: a renewal that failed is repeated soon",
        "workers/process/liveness.py",
        "pause_s = self._lease_s / _TRIES_A_LEASE",
        "pass",
        f"{_DEAD}::test_a_lease_never_lapses_when_the_connection_falls_silent[stopped]",
    ),
    Mutant(
        "connections: a dispatch goes out on a new one",
        "app/dispatch.py",
        '"retry_on_timeout": True',
        '"retry_on_timeout": False',
        "tests/unit/app/test_dispatch.py::test_a_dispatch_goes_out_although_its_connection_fell_silent",
    ),
    Mutant(
        "connections: a lost one of broadcasts is not waited on",
        "app/broker.py",
        '"retry_on_timeout": False',
        '"retry_on_timeout": True',
        "tests/unit/app/test_dispatch.py::test_a_consumer_whose_broadcasts_lose_their_connection_hears_of_it_and_does_"
        "not_wait",
    ),
    Mutant(
        "connections: an S3 server's peer must acknowledge",
        "app/stores/objects/s3.py",
        ", *sockets.OPTIONS]",
        "]",
        f"{_DEAD}::test_a_store_whose_connections_fell_silent_is_read_on_a_new_one",
        slow=True,
    ),
    # Disks that are nearly full.
    Mutant(
        "disk: no call while there is a shortage",
        "app/stores/redis/lua/payloads.lua",
        "if shortage then return redis.error_reply('FULL ' .. shortage) end",
        "",
        f"{_STORES}/test_shortage.py::test_no_new_call_is_admitted_while_a_disk_is_nearly_full",
    ),
    Mutant(
        "disk: a refused call is not written",
        "app/stores/redis/futures.py",
        "        content = self._staging.place(payload)\n",
        "        content = self._staging.place(payload)\n        self._staging.write(content.key, payload)\n",
        f"{_STORES}/test_shortage.py::test_a_large_call_that_is_refused_is_not_written_to_disk",
    ),
    Mutant(
        "disk: no file of a folder store",
        "app/stores/disk.py",
        "            self.check()\n",
        "",
        "--confcutdir=tests/unit/app/stores tests/unit/app/stores/test_disk.py",
    ),
    Mutant(
        "disk: no snapshot",
        "workers/checkpoints/snapshot_upload.py",
        '                Disk("the snapshots", unfinished, self.least_free).check(size)\n',
        "",
        "--confcutdir=tests/unit/app/stores tests/unit/app/stores/test_disk.py",
    ),
    Mutant(
        "disk: no save",
        "workers/checkpoints/writer.py",
        "            self.scratch.check(captured.write.size)\n",
        "",
        "tests/unit/workers/checkpoints/test_writer.py::test_a_save_waits_for_room_on_its_disk",
    ),
    Mutant(
        "saves: where the next start removes them",
        "workers/checkpoints/writer.py",
        "TemporaryDirectory(dir=folder)",
        "TemporaryDirectory()",
        "tests/unit/workers/checkpoints/test_writer.py::"
        "test_a_killed_save_leaves_nothing_behind_the_next_start_of_its_worker",
    ),
    Mutant(
        "disk: some archives at once",
        "app/stores/disk.py",
        "            if len(self._sizes) >= _MOST_COPIES:\n",
        "            if False:\n",
        "tests/unit/app/api/test_archives.py::test_the_fifth_archive_at_once_is_refused_until_another_one_ends",
    ),
    Mutant(
        "disk: room for all archives",
        "app/stores/disk.py",
        "check(unwritten + size)",
        "check(size)",
        "tests/unit/app/api/test_archives.py::test_an_archive_waits_for_room_for_its_largest_file",
    ),
    Mutant(
        "disk: the API looks",
        "app/services/admission.py",
        "oplog.take_none(shortages[0], _SHORT_S)",
        "pass",
        "tests/processes/app/test_wsgi.py",
        slow=True,
    ),
    Mutant(
        "logs: a large one is moved aside",
        "app/stack/child.py",
        "        os.truncate(self.log, 0)\n",
        "",
        "tests/unit/app/stack/test_child.py",
    ),
    # Names of nodes.
    Mutant(
        "node: a live worker keeps its name",
        "app/stores/redis/lua/leases.lua",
        "redis.call('EXISTS', 'tinsmith:lease:' .. holder) == 1 then return found end",
        "false then return found end",
        f"{_NODE}::test_a_live_worker_of_this_machine_keeps_its_name_and_the_refusal_names_its_process",
    ),
    Mutant(
        "node: each worker claims its name",
        "workers/process/assembly.py",
        "    node_name.claim(parts.oplog, parts.worker, queue, settings.engine.lease_s)\n",
        "",
        "tests/faults/test_celery.py::test_a_second_worker_of_the_same_name_is_refused_and_the_first_goes_on",
        slow=True,
    ),
    Mutant(
        "node: a process number that is used again",
        "workers/process/node_name.py",
        ' and _born(holder["pid"]) == holder["born"]',
        "",
        f"{_NODE}::test_a_later_process_with_the_same_number_is_not_taken_for_it",
    ),
    Mutant(
        "node: a worker that is heard again keeps its queue",
        "app/stores/redis/lua/leases.lua",
        "if redis.call('EXISTS', 'tinsmith:lease:' .. cjson.decode(ARGV[2]).worker) == 1 then return 0 end",
        "",
        _QUEUES,
    ),
    Mutant(
        "node: one that is still ending is waited for",
        "workers/process/node_name.py",
        "(ending_s if is_here else 2 * lease_s)",
        "(0 if is_here else 2 * lease_s)",
        f"{_NODE}::test_a_process_of_this_machine_that_is_still_ending_is_waited_for",
    ),
    Mutant(
        "direct queues: of a worker that comes back meanwhile",
        "workers/maintenance/direct_queues.py",
        "                    queue.declare()\n                    return\n",
        "                    return\n",
        f"{_QUEUES}::test_the_queue_of_a_worker_that_comes_back_meanwhile_keeps_its_bindings",
    ),
    Mutant(
        "data folder: a mount that ignores a chmod",
        "app/stack/data_folder.py",
        "    if _mode(folder) & _OTHERS and all(",
        "    if False and all(",
        f"{_DATA}::test_a_folder_that_cannot_be_made_private_is_named_with_the_remedy_unless_nobody_else_reaches_it",
    ),
    Mutant(
        "folder store: shared with those who may write to it",
        "app/stores/objects/folder.py",
        "if mode & write)",
        "if False)",
        f"{_FOLDER}::test_users_who_may_write_to_the_folder_share_its_files_whatever_the_umask",
    ),
    Mutant(
        "orphans: a payload that a move knows",
        "app/stores/redis/payloads.py",
        " or spilling is not None or",
        " or",
        "tests/unit/workers/maintenance/test_orphans.py::test_a_payload_that_a_call_or_a_move_needs_stays",
    ),
    Mutant(
        "orphans: a payload that a call refers to",
        "app/stores/redis/payloads.py",
        "spilled == key.encode() or ",
        "",
        "tests/unit/workers/maintenance/test_orphans.py::test_a_payload_that_a_call_or_a_move_needs_stays",
    ),
    # A folder store that is not mounted.
    Mutant(
        "folder store: a missing object of a disk that has gone",
        "app/stores/objects/folder.py",
        "if not self._unfinished.is_dir():",
        "if False:",
        f"{_FOLDER}::test_while_the_disk_is_not_mounted_nothing_is_said_to_be_missing",
    ),
    Mutant(
        "results: one that the store lacks is not gone",
        "app/stores/redis/futures.py",
        'raise Unavailable(\n                f"the object store does not have',
        'raise Gone(\n                f"the object store does not have',
        f"{_RESULTS}::test_a_result_that_the_store_lacks_may_be_back_later_and_is_no_410",
    ),
    Mutant(
        "polls: held a moment while the object store is away",
        "app/services/polling.py",
        "if isinstance(error, Unavailable) or is_outage(error):",
        "if not isinstance(error, Unavailable) and is_outage(error):",
        "tests/unit/app/services/test_polling.py::test_a_poll_in_an_outage_is_held_a_moment_since_the_sdk_asks_again_at_once",
    ),
    # Memory.
    Mutant(
        "take_calls: noted in a full memory",
        "app/stores/redis/lua/lifecycle.lua",
        "-- script: take_calls flags=allow-oom",
        "-- script: take_calls",
        f"{_SHORTAGE}::test_what_keeps_sessions_and_refusals_going_is_noted_in_a_full_memory",
    ),
    Mutant(
        "results: of two moves one counts",
        "app/stores/redis/lua/results.lua",
        "\n   or redis.call('HEXISTS', future, 'body') + redis.call('EXISTS', 'tinsmith:result:' .. ARGV[1]) == 0 then",
        " then",
        f"{_RESULTS}::test_of_two_movers_one_wins_and_the_other_object_goes",
    ),
    Mutant(
        "results: one that expired does not move",
        "app/stores/redis/lua/results.lua",
        " or redis.call('EXISTS', future) == 0\n",
        "\n",
        f"{_RESULTS}::test_a_result_that_expires_while_it_moves_counts_no_longer_and_its_object_goes",
    ),
    Mutant(
        "results: the budget of Ops",
        "app/stores/redis/lua/journal.lua",
        "or head[2] and no_room_for_results(cjson.decode(head[2]))",
        "",
        f"{_RESULTS}::test_a_project_over_its_budget_waits_and_others_do_not",
    ),
    Mutant(
        "results: the budget of samples",
        "app/stores/redis/lua/samples.lua",
        " or no_room_for_results(owner)",
        "",
        f"{_RESULTS}::test_a_project_over_its_budget_waits_and_others_do_not",
    ),
    Mutant(
        "results: an expired one counts no longer",
        "app/stores/redis/lua/results.lua",
        "redis.call('HINCRBY', 'tinsmith:result_bytes', result.owner, -result.size)",
        "1",
        f"{_RESULTS}::test_a_result_that_has_expired_counts_no_longer_and_its_object_goes",
    ),
    Mutant(
        "results: one that expired counts no longer when its request is admitted again",
        "app/stores/redis/lua/results.lua",
        "  forget_result(request)\n  if size",
        "  if size",
        f"{_RESULTS}::test_a_request_that_is_admitted_again_after_its_result_expired_counts_once",
    ),
    Mutant(
        "results: one that is still there is not forgotten",
        "app/stores/redis/lua/results.lua",
        "  if redis.call('EXISTS', 'tinsmith:future:' .. request) == 0 then\n    forget_result(request)\n  else\n",
        "  if true then\n    forget_result(request)\n  else\n",
        f"{_RESULTS}::test_a_result_that_is_there_counts_whatever_its_listed_expiry",
    ),
    Mutant(
        "results: a read moves the listed expiry",
        "app/stores/redis/futures.py",
        "        if is_large:\n",
        "        if False:\n",
        f"{_RESULTS}::test_the_time_to_forget_a_result_falls_in_the_step_that_lets_it_expire_sooner",
    ),
    Mutant(
        "memory: that of the container",
        "app/stack/memory.py",
        "min([_machine_bytes(), *(bound for bound, _ in _bounds(groups, own))])",
        "_machine_bytes()",
        "tests/unit/app/stack/test_memory.py",
    ),
    Mutant(
        "memory: the free part of the container's",
        "app/stack/memory.py",
        "min([available, *(bound - used for bound, used in _bounds(groups, own))])",
        "available",
        "tests/unit/app/stack/test_memory.py::test_version_1_says_in_other_files_how_much_is_free",
    ),
)
