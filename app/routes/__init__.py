"""One blueprint a resource; a view is load, service, dump."""

from __future__ import annotations

from flask_smorest import Api

from app.routes import (
    archives,
    audit,
    auth,
    billing,
    checkpoints,
    client,
    custom_losses,
    docs,
    futures,
    hub,
    limits,
    models,
    objects,
    openai,
    operations,
    queue,
    runs,
    sampling,
    sessions,
    training,
    weights,
)

_BLUEPRINTS = (
    client.blueprint,
    auth.blueprint,
    sessions.blueprint,
    models.blueprint,
    custom_losses.blueprint,
    training.blueprint,
    weights.blueprint,
    futures.blueprint,
    queue.blueprint,
    sampling.blueprint,
    runs.blueprint,
    checkpoints.blueprint,
    objects.blueprint,
    archives.blueprint,
    limits.blueprint,
    openai.blueprint,
    audit.blueprint,
    billing.blueprint,
    hub.blueprint,
    operations.blueprint,
)


def register(api: Api) -> None:
    """Add every route of the API, and the page that lists them."""
    for blueprint in _BLUEPRINTS:
        api.register_blueprint(blueprint)
    docs.register(api)
