"""An API with a byte tokenizer for its base model, and without any session."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from flask import Flask

from app import create_app
from app.api.base import EXTENSION
from app.domain.limits import Limits
from app.services.openai.tokenizer import read
from app.settings import ApiSettings, Settings
from app.stores.redis.client import connect
from app.stores.redis.completions import TokenStreams
from tests.tokenizers import WITH_TOOLS, byte_tokenizer
from tests.unit.app.api.chat.anthropic.caller import Anthropic
from tests.unit.app.api.chat.openai.caller import OpenAi
from tests.unit.app.api.chat.standin import CAPACITY, CONTEXT, MAX_BODY_BYTES, Standin
from tests.unit.app.conftest import Api, add_worker


@pytest.fixture(scope="module")
def template() -> str:
    """The chat template of the base model."""
    return WITH_TOOLS


@pytest.fixture(scope="module")
def special() -> Sequence[str]:
    """The special tokens of the base model beside BEGIN and END."""
    return ()


@pytest.fixture(scope="module")
def app(settings: Settings, tmp_path_factory: pytest.TempPathFactory, template: str, special: Sequence[str]) -> Flask:
    folder = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, special)
    base = settings.base_models[0].model_copy(update={"path": str(folder)})
    limits = ApiSettings(poll_hold_s=0.3, poll_capacity=CAPACITY, max_body_bytes=MAX_BODY_BYTES)
    return create_app(settings.model_copy(update={"base_models": (base,), "api": limits}))


@pytest.fixture
def served(app: Flask, state_url: str) -> Iterator[tuple[Api, Standin]]:
    services = app.extensions[EXTENSION]
    with connect(state_url) as client, connect(services.settings.broker_url) as broker:
        client.flushall()
        add_worker(services, "trainer")
        add_worker(services, "sampler", CONTEXT)
        tokenizer = read(Path(services.settings.base_models[0].path))
        standin = Standin(services.oplog, TokenStreams(broker), tokenizer)
        thread = threading.Thread(target=standin.run, daemon=True)
        thread.start()
        yield Api(app.test_client(), services), standin
        standin.over.set()
        thread.join(30)


@pytest.fixture
def openai(served: tuple[Api, Standin]) -> OpenAi:
    return OpenAi(*served)


@pytest.fixture
def anthropic(served: tuple[Api, Standin]) -> Anthropic:
    return Anthropic(*served)


@pytest.fixture
def spent_budget(app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every project has a budget of nothing."""
    limits = app.extensions[EXTENSION].quotas._limits
    monkeypatch.setattr(limits, "_default", Limits(monthly_budget=0))
    monkeypatch.setattr(limits, "_found", {})


@pytest.fixture
def follows_schemas(served: tuple[Api, Standin]) -> Iterator[None]:
    """The sampler says that its answers can follow a JSON schema."""
    services = served[0].services
    add_worker(services, "sampler", CONTEXT, follows_schemas=True)
    services.bases.live()
    yield
    add_worker(services, "sampler", CONTEXT)
    services.bases.live()
