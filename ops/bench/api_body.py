"""Time of the API to answer a forward_backward of 5 MB, journaled and dispatched. No worker runs the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from app import ids
from app.dispatch import Dispatcher, celery_app, train_queue
from app.domain import ops
from app.domain.records import BaseModelInfo
from app.services.validation import check_forward_backward
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.wire.forward_backward import no_losses, open_envelope
from ops.bench import batches, client_batches, servers, timing
from ops.bench.client import Client
from ops.bench.report import Goal, Outcome
from ops.bench.timing import summary

_GOAL_MS = 50.0
_ROUNDS = 40
_WARM_UP = 3
_TOKENS = 1024
_BYTES_A_TOKEN = 16  # int32 token, int64 target, float32 weight
_ROWS = 5_000_000 // (_TOKENS * _BYTES_A_TOKEN)
INFO = BaseModelInfo("bench/base", "LlamaForCausalLM", 49_152, 8192, "bfloat16", ("attn", "mlp", "unembed"))


def run(folder: Path, rows: int = _ROWS, rounds: int = _ROUNDS) -> Outcome:
    with (
        servers.prepared_api(folder, INFO) as api,
        servers.running_api(api),
        closing(Client(api.url)) as client,
    ):
        bodies = _Bodies(client, rows)
        parts = _Parts(api, bodies)
        sides: dict[str, Callable[[], Any]] = {"post": bodies.post, "parts": parts.measure}
        timing.alternate(_WARM_UP, sides)
        found = timing.alternate(rounds, sides)
    figures: dict[str, Any] = {
        "body_bytes": bodies.size,
        "datums": rows,
        "post_ms": summary(found["post"]),
        "parts_ms": {name: summary([sample[name] for sample in found["parts"]]) for name in found["parts"][0]},
    }
    return Outcome(figures, (Goal("answer to 5 MB: p50", figures["post_ms"]["p50"], "at_most", _GOAL_MS, "ms"),))


class _Bodies:
    """Bodies for one model, each with its own seq_id."""

    def __init__(self, client: Client, rows: int) -> None:
        self._client = client
        self.model_id, _ = client.admit_model(INFO.name, 8)
        self._request = client_batches.request(batches.random_tokens(rows, _TOKENS, INFO.vocab_size), self.model_id)
        self.seq = 0
        self.size = self._request.ByteSize()

    def next(self) -> bytes:
        self.seq += 1
        self._request.seq_id = self.seq
        return self._request.SerializeToString()

    def post(self) -> float:
        """Returns the ms from the first byte sent to the complete answer."""
        body = self.next()
        return timing.timed_ms(lambda: self._client.send(body))


class _Parts:
    """Steps of the API on a body, called one by one in this process. The rest of a POST is HTTP and Flask."""

    def __init__(self, api: servers.Api, bodies: _Bodies) -> None:
        self._bodies = bodies
        self._oplog = RedisOpLog(connect(api.settings.redis.url), api.settings.engine)
        self._dispatcher = Dispatcher(celery_app(api.settings))

    def measure(self) -> dict[str, float]:
        """Returns the ms of each part."""
        body = self._bodies.next()
        found: dict[str, float] = {}

        def part(name: str, call: Callable[[], Any]) -> Any:
            results: list[Any] = []
            found[name] = timing.timed_ms(lambda: results.append(call()))
            return results[0]

        envelope = part("parse", lambda: open_envelope(body))
        op = part("decode", lambda: envelope.decode(no_losses))
        part("check", lambda: check_forward_backward(op, INFO, critic=False))
        payload = part("encode", lambda: ops.encode(op))
        digest = part("digest", lambda: ops.digest(payload))
        model_id, seq = self._bodies.model_id, self._bodies.seq
        part("journal", lambda: self._oplog.admit(model_id, seq, op.kind, payload, digest))
        request_id, queue = ids.request_id(model_id, seq), train_queue(INFO.name)
        part("ring", lambda: self._dispatcher.send(op.kind, request_id, model_id, queue))
        return found
