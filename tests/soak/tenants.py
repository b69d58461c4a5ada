"""Projects with a user and a key each, and what they are billed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import tinker

from app.commands.connection import account_service
from app.domain.accounts import SCOPES
from app.services.tenants.accounts import AccountService
from app.stores.objects import create
from app.stores.redis.records import RedisRecords
from tests.contract.stack import Stack

_LONGEST = timedelta(days=14)


def make_tenants(stack: Stack, count: int) -> list[Stack]:
    """The stack as the clients of `count` new projects see it."""
    accounts = account_service(stack.settings(), create(stack.settings()))
    organisation = accounts.add_organisation("soak").id
    return [replace(stack, api_key=_key(accounts, organisation, str(number))) for number in range(count)]


def _key(accounts: AccountService, organisation: str, name: str) -> str:
    project, user = accounts.add_project(organisation, name).id, accounts.add_user(organisation, name).id
    accounts.set_role(user, project, "admin")
    return accounts.add_key(user, project, SCOPES)[1]


def billed(tenant: Stack) -> Mapping[str, int]:
    """The tokens and saves that a tenant is billed in all hours up to now, by kind of usage."""
    with tenant.redis() as redis:
        hour = datetime.fromtimestamp(RedisRecords(redis).now() // 3600 * 3600, UTC)
    end = hour + timedelta(hours=1)
    client = tinker.AdminClient(base_url=tenant.url, api_key=tenant.api_key)
    answer = client.get_billing_usage(end - _LONGEST, end).result()
    amounts: Counter[str] = Counter()
    for kind, amount in _amounts(answer):
        amounts[kind] += amount
    return amounts


def _amounts(answer: tinker.types.BillingUsageResponse) -> Iterator[tuple[str, int]]:
    for event in answer.data:
        info = event.event_info
        match info.type:
            case "training" | "sampling_prefill" | "sampling_sample":
                yield info.type, info.token_count
            case "checkpoint":
                yield info.type, info.count
