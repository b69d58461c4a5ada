"""The caller's own key, the limits on it, and a project's usage and audit log."""

from __future__ import annotations

from datetime import UTC
from typing import Any

from marshmallow import Schema, fields, validate

from app.api.base import current_caller, make_blueprint, services
from app.api.schemas import SdkSchema

auth_blueprint = make_blueprint("auth", "Account")

limits_blueprint = make_blueprint("limits", "Account")

billing_blueprint = make_blueprint("billing", "Account")

audit_blueprint = make_blueprint("audit", "Account")


class Token(SdkSchema):
    """A token that replaces a key."""

    jwt = fields.String()


@auth_blueprint.route("/auth/token", methods=["POST"])
@auth_blueprint.response(200, Token)
def create_token() -> dict[str, str]:
    """Create a token that can be used instead of the key for a limited time."""
    return {"jwt": services().own_key.token(current_caller())}


class _Addressed(SdkSchema):
    email = fields.String()


class _Named(SdkSchema):
    name = fields.String()


class _Details(SdkSchema):
    org_details = fields.Nested(_Named)
    user_details = fields.Nested(_Addressed)


class OwnKey(SdkSchema):
    key_id = fields.Integer()
    name = fields.String()
    note = fields.String()
    project_id = fields.String()
    scopes = fields.List(fields.String())
    details = fields.Nested(_Details)


@auth_blueprint.route("/auth/apikey/me", methods=["GET"])
@auth_blueprint.response(200, OwnKey)
def get_own_key() -> dict[str, Any]:
    """Return the key's organisation, user, name and note."""
    return services().own_key.describe(current_caller())


@auth_blueprint.route("/auth/apikey/me", methods=["DELETE"])
@auth_blueprint.response(200)
def revoke_own_key() -> dict[str, str]:
    """Revoke the key that the call is made with."""
    services().own_key.revoke(current_caller())
    return {}


class LimitsAsked(Schema):
    """A query for limits and their use."""

    project_id = fields.String(
        metadata={"description": "a project that the key may use; default: the key's own project"}
    )


class _Limits(Schema):
    """Limits; None means not limited."""

    requests_per_s = fields.Float(allow_none=True)
    tokens_per_s = fields.Float(allow_none=True)
    live_models = fields.Integer(allow_none=True)
    live_sessions = fields.Integer(allow_none=True)
    storage_bytes = fields.Integer(allow_none=True)
    concurrent_samples = fields.Integer(allow_none=True)
    weight = fields.Float()
    checkpoint_ttl_s = fields.Integer(allow_none=True)
    keep_checkpoints = fields.Integer(allow_none=True)
    monthly_budget = fields.Float(allow_none=True)
    capture_days = fields.Integer(allow_none=True)


class _Used(Schema):
    """The current use. Rates are averages over the last seconds, and None where they are not limited. Of the
    monthly_budget it is the cost of this month's usage. It is None without a price, for a key, and in a project without
    a budget for all but its admins."""

    requests_per_s = fields.Float(allow_none=True)
    tokens_per_s = fields.Float(allow_none=True)
    live_models = fields.Integer()
    live_sessions = fields.Integer()
    storage_bytes = fields.Integer()
    concurrent_samples = fields.Integer()
    monthly_budget = fields.Float(allow_none=True)


class _Payer(Schema):
    id = fields.String()
    limits = fields.Nested(_Limits)
    used = fields.Nested(_Used)


class LimitsShown(Schema):
    project = fields.Nested(_Payer)
    key = fields.Nested(_Payer)


@limits_blueprint.route("/limits", methods=["GET"])
@limits_blueprint.arguments(LimitsAsked(), location="query")
@limits_blueprint.response(200, LimitsShown)
def get_limits(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the limits of a project and of the key, and their current use."""
    return services().quotas.describe(current_caller(), asked.get("project_id"))


class UsageAsked(SdkSchema):
    """A query for usage, as the SDK's billing methods send it."""

    starting_on = fields.AwareDateTime(
        required=True, default_timezone=UTC, metadata={"description": "start of the time window; UTC without an offset"}
    )
    ending_before = fields.AwareDateTime(
        required=True, default_timezone=UTC, metadata={"description": "end of the time window, which is not part of it"}
    )


class UsageEvent(SdkSchema):
    bucket_start = fields.String()
    bucket_end = fields.String()
    base_model = fields.String()
    user_id = fields.String(allow_none=True)
    user_name = fields.String(allow_none=True)
    session_id = fields.String(allow_none=True)
    project_id = fields.String()
    estimated_cost_usd = fields.Float(allow_none=True)
    effective_rate_usd_per_million_tokens = fields.Float()
    effective_rate_usd_per_gigabyte_month = fields.Float()
    event_info = fields.Dict()


class UsageSession(SdkSchema):
    user_metadata = fields.Dict(allow_none=True)


class UsageEvents(SdkSchema):
    data = fields.List(fields.Nested(UsageEvent))
    sessions = fields.Dict(keys=fields.String(), values=fields.Nested(UsageSession))


@billing_blueprint.route("/billing/usage/events", methods=["GET"])
@billing_blueprint.arguments(UsageAsked(), location="query")
@billing_blueprint.response(200, UsageEvents)
def get_usage_events(asked: dict[str, Any]) -> dict[str, Any]:
    """List the usage of each hour of a time window, in the projects where the caller is an admin."""
    return services().usage.events(current_caller(), asked["starting_on"], asked["ending_before"])


class RunUsage(Schema):
    """The usage of a run, or without `run_id` the usage of a project and base model that belongs to no run."""

    project_id = fields.String()
    run_id = fields.String(allow_none=True)
    base_model = fields.String()
    training_tokens = fields.Integer()
    prefill_tokens = fields.Integer()
    cached_prefill_tokens = fields.Integer()
    sampled_tokens = fields.Integer()
    device_seconds = fields.Float()
    checkpoints = fields.Integer()
    gigabyte_hours = fields.Float()
    stored_bytes = fields.Integer()
    estimated_cost_usd = fields.Float(allow_none=True)


class RunsUsed(Schema):
    data = fields.List(fields.Nested(RunUsage))


@billing_blueprint.route("/billing/usage/runs", methods=["GET"])
@billing_blueprint.arguments(UsageAsked(), location="query")
@billing_blueprint.response(200, RunsUsed)
def get_usage_of_runs(asked: dict[str, Any]) -> dict[str, Any]:
    """List the usage and cost of each run in a time window, in the projects where the caller is an admin."""
    return {"data": services().usage.runs(current_caller(), asked["starting_on"], asked["ending_before"])}


class StorageItem(SdkSchema):
    project_id = fields.String()
    org_user_urn = fields.String(allow_none=True)
    user_email = fields.String(allow_none=True)
    user_name = fields.String(allow_none=True)
    checkpoint_count = fields.Integer()
    size_bytes = fields.Integer()
    size_gigabytes = fields.Float()
    estimated_monthly_cost_usd = fields.Float(allow_none=True)


class Storage(SdkSchema):
    effective_rate_usd_per_gigabyte_month = fields.Float()
    data = fields.List(fields.Nested(StorageItem))


class StorageAsked(SdkSchema):
    project_id = fields.String(
        load_default=None, validate=validate.Length(1, 256), metadata={"description": "only this project"}
    )


@billing_blueprint.route("/billing/usage/checkpoints/current", methods=["GET"])
@billing_blueprint.arguments(StorageAsked(), location="query")
@billing_blueprint.response(200, Storage)
def get_current_storage(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the number and size of the checkpoints in all projects where the caller is an admin, or in one."""
    return services().usage.storage(current_caller(), asked["project_id"])


class AuditAsked(SdkSchema):
    """A query for the audit log."""

    event_type = fields.String(
        load_default="all",
        validate=validate.OneOf(("all", "checkpoints", "projects", "teams", "organizations")),
        metadata={"description": "only events of this kind"},
    )
    day = fields.Date(load_default=None, metadata={"description": "UTC; default: today"})


class AuditEntry(SdkSchema):
    timestamp = fields.String()
    event = fields.String()
    event_details = fields.Dict()
    model_id = fields.String()
    tinker_path = fields.String()


class AuditLog(SdkSchema):
    entries = fields.List(fields.Nested(AuditEntry))


@audit_blueprint.route("/audit", methods=["GET"])
@audit_blueprint.arguments(AuditAsked(), location="query")
@audit_blueprint.response(200, AuditLog)
def get_audit_log(asked: dict[str, Any]) -> dict[str, Any]:
    """List the audit log of one day for the projects where the caller is an admin, oldest first."""
    return {"entries": services().audit.read(current_caller(), asked["event_type"], asked["day"])}
