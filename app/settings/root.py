"""The settings as a whole, with what follows from several sections."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator

from app.domain.prices import Prices
from app.settings.section import Section
from app.settings.server import (
    ApiSettings,
    EngineSettings,
    LimitSettings,
    RedisSettings,
    StoreSettings,
    TracingSettings,
    netloc,
)
from app.settings.workers import BaseModelSettings

_SHARED_MEMORY = Path("/dev/shm")
_DIGEST = re.compile("[0-9a-f]{64}")
_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1"})


class Settings(Section):
    data_dir: Path = Field(
        Path("tinsmith-data"), description="folder for everything that the stack stores, except on other servers"
    )
    api_keys: tuple[str, ...] = Field((), repr=False, description="sha256 hex digests of valid API keys")
    operator_keys: tuple[str, ...] = Field(
        (),
        repr=False,
        description="those of api_keys that administer all projects in the console; the key that `tinsmith up` makes "
        "is one",
    )
    url_secret: str = Field("", repr=False, description="secret that signs URLs, tokens and the console's logins")
    capture_secret: str = Field(
        "", repr=False, description="secret that encrypts kept answers (limits.project.capture_days); empty keeps none"
    )
    api: ApiSettings = Field(ApiSettings(), description="the HTTP API")
    redis: RedisSettings = Field(RedisSettings(), description="your own servers for state and messages")
    store: StoreSettings = Field(StoreSettings(), description="the object store, which keeps checkpoints")
    engine: EngineSettings = Field(EngineSettings(), description="leases, snapshots, and how long things are kept")
    limits: LimitSettings = Field(LimitSettings(), description="largest calls, and limits of projects")
    tracing: TracingSettings = Field(TracingSettings(), description="OpenTelemetry traces of calls")
    prices: Prices = Field(Prices(), description="prices of usage; usage without a price has no cost")
    base_models: tuple[BaseModelSettings, ...] = Field(
        (), description="a base model; repeat the section for more; without one `tinsmith up` serves the bundled model"
    )

    @field_validator("api_keys", "operator_keys")
    @classmethod
    def _are_digests(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_DIGEST.fullmatch, keys)):
            raise ValueError(
                "one of these is not the sha256 digest of a key, which has 64 hex digits in lower case; print it with "
                "`printf %s KEY | sha256sum`"
            )
        return keys

    @field_validator("base_models")
    @classmethod
    def _have_different_names(cls, bases: tuple[BaseModelSettings, ...]) -> tuple[BaseModelSettings, ...]:
        names = [base.name for base in bases]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"several have the name {min(repeated)!r}; give each base model a name of its own")
        return bases

    def base_model(self, name: str) -> BaseModelSettings | None:
        return next((b for b in self.base_models if b.name == name), None)

    def prices_of(self, base_model: str) -> Prices:
        """The prices of a base model's usage, also of one that is not served any more."""
        base = self.base_model(base_model)
        return base.prices.over(self.prices) if base else self.prices

    @property
    def concurrent_samples(self) -> int:
        """The number of samples that a client should have under way when it polls for each of them."""
        sections = [section for base in self.base_models for section in (base.sampler, base.full_sampler)]
        return min([self.api.poll_capacity, *(section.queue_requests for section in sections if section is not None)])

    @property
    def handover_dir(self) -> Path:
        """The folder for shared-memory transfer: `engine.handover_dir`, or by default a separate folder for each data
        folder."""
        if self.engine.handover_dir:
            return Path(self.engine.handover_dir).resolve()  # workers follow no link there
        if not os.access(_SHARED_MEMORY, os.W_OK):
            return self.data_dir / "handover"
        return _SHARED_MEMORY / f"tinsmith-{hashlib.sha256(bytes(self.data_dir.absolute())).hexdigest()[:16]}"

    @property
    def names_folders(self) -> bool:
        """True when clients load a local tokenizer from its folder, and not by the model's name."""
        if self.api.tokenizers != "auto":
            return self.api.tokenizers == "local"
        return {self.api.host, urlsplit(self.api.public_url).hostname or self.api.host} <= _THIS_MACHINE

    @property
    def public_url(self) -> str:
        return self.api.public_url or f"http://{netloc(self.api.host, self.api.port)}"

    @property
    def broker_url(self) -> str:
        return self.redis.broker_url or _other_database(self.redis.url)


def _other_database(url: str) -> str:
    parts = urlsplit(url)
    # An option `db` is stronger than the path.
    database = parse_qs(parts.query).get("db", [parts.path.removeprefix("/")])[0]
    other = int(database) + 1 if database.isascii() and database.isdigit() else 1
    options = [option for option in parts.query.split("&") if not option.startswith("db=")]
    return parts._replace(path=f"/{other}", query="&".join(options)).geturl()
