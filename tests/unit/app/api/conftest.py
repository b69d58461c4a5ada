from __future__ import annotations

from dataclasses import replace

import pytest

from app.services.tenants.accounts import AccountService
from app.stores.objects.accounts import AccountFiles
from tests.pages import in_mid_hour
from tests.unit.app.conftest import Api
from tests.unit.app.tenant import Tenant, make_tenant


@pytest.fixture
def accounts(api: Api) -> AccountService:
    return AccountService(AccountFiles(api.services.objects), api.services.records)


@pytest.fixture
def tenant(api: Api, accounts: AccountService) -> Tenant:
    in_mid_hour()
    return make_tenant(api, accounts)


@pytest.fixture
def admin(api: Api, accounts: AccountService) -> Api:
    """The only user of a new project, because the object store outlives a test."""
    in_mid_hour()
    organisation = accounts.add_organisation("Tinkers").id
    project = accounts.add_project(organisation, "p").id
    return replace(api, key=Tenant(api, accounts, organisation, project, {}).key("admin"))
