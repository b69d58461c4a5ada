"""The caller's own key. Any key may do this, whatever its scopes."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.auth import OwnKey, Token

blueprint = make("auth", "Keys and tokens")


@blueprint.route("/auth/token", methods=["POST"])
@blueprint.response(200, Token)
def create_token() -> dict[str, str]:
    """A token that stands for the key for a while."""
    return {"jwt": services().own_key.token(current_caller())}


@blueprint.route("/auth/apikey/me", methods=["GET"])
@blueprint.response(200, OwnKey)
def get_own_key() -> dict[str, Any]:
    """Whose key this is."""
    return services().own_key.describe(current_caller())


@blueprint.route("/auth/apikey/me", methods=["DELETE"])
@blueprint.response(200)
def revoke_own_key() -> dict[str, str]:
    """The key works no more."""
    services().own_key.revoke(current_caller())
    return {}
