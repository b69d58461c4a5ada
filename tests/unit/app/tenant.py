"""A project of an organisation, with its own resources, and keys to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from werkzeug.test import TestResponse

from app.domain.accounts import SCOPES, Role, Scope
from app.services.tenants.accounts import AccountService
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import API, BASE, Api, batch

SAMPLED = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {}}


@dataclass
class Tenant:
    """A project with a run, its checkpoint and a sampler in a session, and an upload; a member owns them all."""

    api: Api
    accounts: AccountService
    organisation: str
    project: str
    ids: dict[str, str]

    def key(self, role: Role, scopes: Iterable[Scope] = SCOPES, project: str = "") -> str:
        user = self.accounts.add_user(self.organisation, f"{role}@example.org")
        self.accounts.set_role(user.id, project or self.project, role)
        return self.accounts.add_key(user.id, project or self.project, scopes)[1]

    def call(self, key: str, call: tuple[str, str], body: dict[str, Any] | None) -> TestResponse:
        method, path = call
        given: dict[str, Any] = {"json": self._filled(body or {})}
        if path == "forward_backward":
            message = batch(self.ids["model"], 1).SerializeToString()
            given = {"data": message, "content_type": "application/x-protobuf"}
        return self.api.client.open(self.url(path), method=method, headers={"X-API-Key": key}, **given)

    def url(self, path: str) -> str:
        return self._filled(path if path.startswith("/") else f"{API}/{path}")

    def state(self) -> dict[str, Any]:
        """Contents of the state server, except for the accounts and temporary data."""
        client = self.api.services.oplog._redis
        passing = (b":users", b":keys", b"index:", b"sessions_heard", b"taking_calls", b"workers")
        names = [name for name in client.scan_iter("*") if not any(part in name for part in passing)]
        return {name: client.dump(name) for name in sorted(names)}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(inner) for name, inner in value.items()}
        return value.format(**self.ids) if isinstance(value, str) else value


def make_tenant(api: Api, accounts: AccountService) -> Tenant:
    organisation = accounts.add_organisation("Tinkers").id
    tenant = Tenant(api, accounts, organisation, accounts.add_project(organisation, "kettles").id, {})
    member = replace(api, key=tenant.key("member"))
    sampler = member.sampler()
    sample = member.post("asample", {"sampling_session_id": sampler, "seq_id": 0, **SAMPLED}).json["request_id"]
    session = member.session()
    model = member.model(session)
    path = save_checkpoint(member, model)
    tenant.ids = {"session": session, "model": model, "path": path, "sampler": sampler, "sample": sample}
    tenant.ids["project"] = tenant.project
    upload = member.post("external_weights_upload_start", {"base_model": BASE, "lora_config": {"rank": 4}})
    tenant.ids["upload"] = upload.json["upload_id"]
    return tenant
