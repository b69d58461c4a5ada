"""The whole API in this process, on a real Valkey, with a stand-in sampler: sends requests and checks the answers."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from werkzeug.test import TestResponse

from app import create_app, ids
from app.api.base import EXTENSION
from app.domain import ops
from app.domain.results import PROTOBUF, Result
from app.domain.sampling import SampledSequence, SampleOutput
from app.errors import Fenced
from app.settings import ApiSettings, BaseModelSettings, RedisSettings, Settings, hash_key
from app.stores.redis.client import connect
from app.wire.results import encode_sample
from tests.servers import start_valkey
from tests.tokenizers import byte_tokenizer
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, KEY, Api, add_worker

REQUESTS = int(os.environ.get("TINSMITH_FUZZ_REQUESTS", "600"))
"""The number that all parts send together; `make fuzz` sends 20,000."""
_RENEW_EVERY = 100
_NESTED = ("/oai/", "/anthropic/")
"""Prefixes of the routes whose errors have their message inside."""


def examples(share: float) -> settings:
    """Hypothesis' settings for a part that sends this share of the requests; a failing example is shrunk."""
    return settings(
        max_examples=max(1, round(REQUESTS * share)),
        database=None,
        deadline=None,
        derandomize="TINSMITH_FUZZ_REQUESTS" not in os.environ,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )


@dataclass
class World:
    """The world under test.

    `known` are ids by the name of the field or path part they fit. They are renewed at times, because requests end
    them.
    """

    api: Api
    statuses: Counter[int] = field(default_factory=Counter)
    took_ms: list[float] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        return len(self.took_ms)

    def send(self, method: str, path: str, **options: Any) -> TestResponse:
        """Returns the answer, which must not be a 5xx. An error must name the fault in JSON."""
        if self.sent % _RENEW_EVERY == 0:
            self._renew()
        headers = {"X-API-Key": KEY, **options.pop("headers", {})}
        started = time.perf_counter()
        answer = self.api.client.open(path, method=method, headers=headers, **options)
        body = answer.data
        self.took_ms.append(1000 * (time.perf_counter() - started))
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, (method, path, options, body)
        if answer.status_code >= 400 and answer.status_code != 408:
            assert _complaint(json.loads(body), path), (method, path, options, body)
        return answer

    def fill_in(self, value: Any) -> Any:
        """The same with every id replaced by an existing one."""
        if isinstance(value, dict):
            return {key: self.known.get(key, self.fill_in(part)) for key, part in value.items()}
        return [self.fill_in(part) for part in value] if isinstance(value, list) else value

    def report(self) -> str:
        p99 = float(np.percentile(self.took_ms, 99))
        return f"{self.sent} requests, p99 {p99:.1f} ms, statuses {dict(sorted(self.statuses.items()))}"

    def _renew(self) -> None:
        session = self.api.session()
        model = self.api.model(session)
        path = save_checkpoint(self.api, model, "sampler_weights")
        run, kind, name = path.removeprefix("tinker://").split("/")
        sampler = self.api.sampler()
        self.known = {
            "session_id": session,
            "model_id": model,
            "run": run,
            "kind": kind,
            "name": name,
            "path": path,
            "model_path": path,
            "sampling_session_id": sampler,
            "sampler_id": sampler,
            "request_id": ids.request_id(model, 0),
            "base_model": BASE,
            "model": BASE,
        }


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    with start_valkey(folder / "valkey") as url:
        configured = Settings(
            data_dir=folder / "data",
            api_keys=(hash_key(KEY),),
            url_secret="s" * 32,
            api=ApiSettings(poll_hold_s=0.005, max_body_bytes=2**20),
            redis=RedisSettings(url=url),
            base_models=(BaseModelSettings(name=BASE, path=str(byte_tokenizer(folder / "tokenizer"))),),
        )
        app = create_app(configured)
        services = app.extensions[EXTENSION]
        over = threading.Event()
        with connect(url):
            for role in ("trainer", "sampler"):
                add_worker(services, role)
        sampler = threading.Thread(target=_sample, args=(services.oplog, over), daemon=True)
        sampler.start()
        yield World(Api(app.test_client(), services))
        over.set()
        sampler.join(30)


def _sample(oplog: Any, over: threading.Event) -> None:
    """Every request is answered with an end token for each sample, unless it was cancelled meanwhile."""
    while not over.wait(0.002):
        for waiting in oplog.pending():
            with contextlib.suppress(Fenced):
                entry = oplog.claim_sample(waiting.id, "node/fuzz")
                if entry is not None:
                    asked = ops.decode(entry.payload)
                    one = SampledSequence(np.array([257], np.int32), np.zeros(1, np.float32), True)
                    output = SampleOutput((one,) * asked.num_samples, _scores(asked))
                    oplog.finish_sample(waiting.id, Result(encode_sample(output), PROTOBUF))


def _scores(asked: Any) -> np.ndarray | None:
    return np.zeros(len(asked.prompt), np.float32) if asked.prompt_logprobs else None


def _complaint(body: Any, path: str) -> str:
    if path.startswith(_NESTED):
        return str(body["error"]["message"])
    assert set(body) == {"detail", "error"}
    return str(body["detail"])
