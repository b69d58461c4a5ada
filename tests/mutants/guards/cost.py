"""Guards of cost: usage of runs, the time of devices, and budgets."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LUA = "app/stores/redis/lua"
_BUDGET = "tests/unit/app/api/test_budget.py"
_PAGES = "--confcutdir=tests/unit/app/stores -p tests.unit.conftest tests/unit/app/stores/redis/test_pages.py"
_SPENDING = "tests/unit/app/services/tenants/test_spending.py"
_USAGE = "tests/unit/workers/train/test_usage.py"
_COMMITTER = "workers/train/committer.py"

MUTANTS = (
    Mutant(
        "cost: a spent budget refuses",
        f"{_LUA}/limits.lua",
        "     and charge.spent >= limits.monthly_budget then",
        "     and charge.spent > limits.monthly_budget then",
        f"{_BUDGET}::test_a_spent_budget_refuses_what_costs_and_says_what_to_do",
    ),
    Mutant(
        "cost: a chunk that later ones wait for",
        f"{_LUA}/limits.lua",
        "payer.kind == 'project' and not awaited\n",
        "payer.kind == 'project'\n",
        f"{_BUDGET}::test_a_chunk_that_later_chunks_of_its_batch_wait_for_is_admitted",
    ),
    Mutant(
        "cost: a key has no budget",
        f"{_LUA}/limits.lua",
        " and payer.kind == 'project' and not awaited\n",
        " and not awaited\n",
        f"{_BUDGET}::test_a_budget_is_one_projects_and_a_keys_is_ignored",
    ),
    Mutant(
        "cost: a step uses gradients that were paid for",
        "app/services/admission.py",
        "        if isinstance(op, ForwardBackward):\n            charge",
        "        if True:\n            charge",
        f"{_BUDGET}::test_what_was_accepted_before_is_repeated_and_stepped_saved_and_read",
    ),
    Mutant(
        "cost: usage of a run is counted for no other",
        "app/services/tenants/usage.py",
        '            found["", base_model][kind] -= int(text)\n',
        "",
        f"{_BUDGET}::test_each_run_has_its_usage_and_cost_and_the_rest_belongs_to_none",
    ),
    Mutant(
        "cost: a month has the storage of its own hours",
        f"{_LUA}/pages.lua",
        "  count_month(held[1], held[3], 'storage '",
        "  count_month(held[1], hour_now(), 'storage '",
        f"{_PAGES}::test_months_are_those_of_the_calendar",
    ),
    Mutant(
        "cost: a refilled month is never lowered",
        f"{_LUA}/pages.lua",
        "  if amount > tonumber(redis.call('HGET', key, name) or 0) then\n",
        "  if true then\n",
        f"{_SPENDING}::test_usage_that_is_still_there_is_never_lowered",
    ),
    Mutant(
        "cost: a page in both stores is refilled once",
        f"{_LUA}/pages.lua",
        "stored[hour] and {} or redis.call",
        "redis.call",
        f"{_SPENDING}::test_a_page_that_is_in_both_stores_counts_once",
    ),
    Mutant(
        "cost: time of devices is no token",
        f"{_LUA}/limits.lua",
        "(kind == 'device' and 0 or amount)",
        "amount",
        f"{_PAGES}::test_the_time_of_devices_takes_no_tokens_from_a_refund",
    ),
    Mutant(
        "cost: a shared pass is divided",
        _COMMITTER,
        "* self._devices * share)",
        "* self._devices)",
        f"{_USAGE}::test_the_time_of_a_shared_pass_is_divided_by_tokens_and_counts_each_device",
    ),
    Mutant(
        "cost: nobody pays for a failed Op",
        _COMMITTER,
        "weights = [average if each is None",
        "weights = [0 if each is None",
        f"{_USAGE}::test_nobody_pays_for_an_op_that_failed_in_a_shared_pass",
    ),
    Mutant(
        "cost: an idle engine costs nothing",
        "workers/sample/device_time.py",
        "            self._at = now\n",
        "            self._at = self._at or now\n",
        "tests/unit/workers/sample/test_device_time.py::test_time_is_divided_among_those_inside_by_their_sequences",
    ),
)
